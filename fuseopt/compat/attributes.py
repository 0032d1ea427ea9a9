"""Make a traced step read and write its optimizer's attributes as Python does."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .layers import leads_to, traces_for
from .names import attribute_of, find
from .patches import Hook, Patcher, patch
from .tracing import tracing


@patch(
    "attribute-writes",
    "what a step writes to its optimizer (self.count += 1) is kept",
    "a step that writes attributes of its optimizer runs in eager",
    bits=True,
)
def WRITES(patcher: Patcher) -> None:
    """Add an optimizer to the objects whose changes Dynamo writes back.

    Without this, the rest of the trace reads such a write, but then the write is lost,
    with any backend (torch 2.11 to 2.15). An optimizer that a step finds in two places
    would be two objects to Dynamo. Relies on the method with which Dynamo records a
    write, and on its table of objects by identity.
    """
    builder = find("torch._dynamo.variables.builder:VariableBuilder")
    effects = find("torch._dynamo.side_effects:SideEffects")
    optimizer = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    backend = patcher.backend

    def stored(original: Hook, self: Any, item: Any, *args: Any, **more: Any) -> Any:
        if isinstance(item, optimizer):
            tracing.stored.add(str(args[0]) if args else "")
            value = item.value
            ours = leads_to(self.output_graph_weakref().compiler_fn, backend)
            if ours and id(value) not in self.id_to_variable:
                self.id_to_variable[id(value)] = item
                self.keepalive.append(value)
        return original(self, item, *args, **more)

    def build(original: Hook, self: Any, value: Any) -> Any:
        if not isinstance(value, Optimizer) or not traces_for(self.tx, backend):
            return original(self, value)
        found = vars(self.tx.output).setdefault("fuseopt_optimizers", {})
        table = self.tx.output.side_effects.id_to_variable
        if id(value) in found and id(value) not in table:
            table[id(value)] = found[id(value)]
            self.tx.output.side_effects.keepalive.append(value)
        variable = original(self, value)
        if isinstance(variable, optimizer):
            found.setdefault(id(value), variable)
        return variable

    patcher.around(effects, "store_attr", stored, "self", "item", "name", "value")
    patcher.around(builder, "__call__", build, "self", "value")


@patch(
    "attribute-reads",
    "an attribute of an optimizer is read by its whole name",
    "a step that reads an attribute like self.t or self.group runs in eager",
    bits=True,
)
def READS(patcher: Patcher) -> None:
    """Treat only the exact name `_init_group` as that method.

    Dynamo treats each substring of it so: a counter `self.t` is then no number (torch
    2.11 to 2.15).
    """
    kind = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    name_of_read = attribute_of(kind, "tp_getattro_impl", "var_getattr")
    backend = patcher.backend

    def whole(original: Hook, self: Any, tx: Any, name: str) -> Any:
        part = name in "_init_group" and name != "_init_group"
        if part and traces_for(tx, backend):
            return getattr(super(kind, self), name_of_read)(tx, name)
        return original(self, tx, name)

    patcher.around(kind, name_of_read, whole, "self", "tx", "name")
