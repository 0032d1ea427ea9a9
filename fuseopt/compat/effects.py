"""Refuse what a step leaves behind, where Dynamo leaves something else.

Where the trace of a step meets such code, the trace ends and the step runs in eager:
its bits are eager's, and the user is told the line.
"""

from __future__ import annotations

from typing import Any

from .guards import guard
from .hooks import asks
from .leaving import refuse
from .names import find
from .patches import Hook, Patcher
from .tracing import tracing


@guard("refused-class-writes", "what a step writes to a class is refused")
def CLASS_WRITES(patcher: Patcher) -> None:
    """No attribute of a class is written: through instances and derived classes, Dynamo
    reads it as it was before the step.
    """
    effects = find("torch._dynamo.side_effects:SideEffects")
    classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def stored(original: Hook, self: Any, item: Any, *args: Any, **more: Any) -> Any:
        if isinstance(item, classes):
            tx = self.output_graph_weakref().root_tx
            if asks(tx):
                refuse(tx, f"it writes an attribute of the class {item.value.__name__}")
        return original(self, item, *args, **more)

    patcher.around(effects, "store_attr", stored, "self", "item", "name", "value")


@guard("refused-finalizers", "objects that run code at their end are refused")
def FINALIZERS(patcher: Patcher) -> None:
    """No object is made of a class with a `__del__`: Dynamo makes one more of it, which
    ends while it traces.
    """
    classes = find("torch._dynamo.variables.user_defined:UserDefinedClassVariable")

    def call(original: Hook, self: Any, tx: Any, *args: Any) -> Any:
        if asks(tx) and hasattr(self.value, "__del__"):
            refuse(tx, f"it makes a {self.value.__name__}, which has a __del__")
        return original(self, tx, *args)

    patcher.around(classes, "call_function", call, "self", "tx")


@guard("refused-kept-iterators", "iterators that a step keeps are refused")
def KEPT_ITERATORS(patcher: Patcher) -> None:
    """No iterator that a step makes outlives it: Dynamo keeps what is left of a list,
    and all that a generator would yield, as the iterator of a tuple.
    """
    effects = find("torch._dynamo.side_effects:SideEffects")
    iterators = (
        find("torch._dynamo.variables.lists:ListIteratorVariable"),
        find("torch._dynamo.variables.functions:LocalGeneratorObjectVariable"),
    )

    def writing(original: Hook, self: Any, *args: Any, **more: Any) -> Any:
        before, tracing.writing = tracing.writing, True
        try:
            return original(self, *args, **more)
        finally:
            tracing.writing = before

    def rebuild(original: Hook, self: Any, codegen: Any) -> Any:
        if tracing.writing and asks(codegen.tx):
            refuse(codegen.tx, "it keeps an iterator")
        return original(self, codegen)

    patcher.around(effects, "codegen_save_tempvars", writing, "self")
    patcher.around(effects, "codegen_update_mutated", writing, "self")
    for kind in iterators:
        patcher.around(kind, "reconstruct", rebuild, "self", "codegen")
