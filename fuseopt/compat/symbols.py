"""Make an optimizer's numbers symbols in a trace, so that a schedule never recompiles.

Dynamo treats a float as a constant until it has changed, and then compiles anew. Here
floats that an optimizer holds are symbols from the first trace on. So are integers that
its step counts. Some uses of a number change the structure of the step (an exponent, a
size, a text). There the number is a guarded constant, until it has changed once.
outcomes.py evaluates numbers, and symbol_uses.py handles their uses.

A trace that fails with symbols is repeated without.
"""

from __future__ import annotations

import contextlib
import dis
import inspect
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from .counters import is_counted
from .hooks import found_at, install, name_of
from .names import Missing, find, takes
from .patch_state import patch_state
from .patches import Hook, Patcher, patch
from .tracing import traces_step, tracing

log = logging.getLogger("fuseopt")


def can_stay_symbolic() -> bool:
    """Can integers that a step counts be symbols?"""
    return COUNTERS.available()


def _moves(builder: Any) -> bool:
    """May a number that Dynamo is about to take in be a symbol from now on?"""
    config = find("torch._dynamo:config")
    is_constant_source = find("torch._dynamo.source:is_constant_source")
    is_from_defaults = find("torch._dynamo.source:is_from_defaults")
    source = builder.source
    return (
        traces_step()
        and not tracing.constants
        and bool(config.automatic_dynamic_shapes)
        and not is_constant_source(source)
        and not is_from_defaults(source)
        and _holder(builder.tx, source) is not None
    )


def _holder(tx: Any, source: Any) -> Any:
    """Return the optimizer that holds the number at a source, or None."""
    while getattr(source, "base", None) is not None:
        source = source.base
        value = found_at(tx, source)
        if isinstance(value, torch.optim.Optimizer):
            return value
    return None


def _is_foreign(tx: Any, source: Any) -> bool:
    """Does other code keep a number in a group, such as an epoch?"""
    holder = _holder(tx, source)
    return (
        isinstance(getattr(source, "index", None), str)
        and any(found_at(tx, source.base) is x for x in holder.param_groups)
        and source.index not in holder.defaults
    )


# ---------------------------------------------------------------- symbols


LOST = "numbers that move are constants until they have moved: two compilations more"


@patch("float-symbols", "floats of an optimizer are symbols from the start", LOST)
def FLOATS(patcher: Patcher) -> None:
    """Trace floats as symbols. A trace that fails with symbols is repeated without."""
    config = find("torch._dynamo:config")
    GuardBuilder = find("torch._dynamo.guards:GuardBuilder")
    GraphArg = find("torch._dynamo.variables.builder:GraphArg")
    kind = find("torch._dynamo.variables.builder:VariableBuilder")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    DimDynamic = find("torch.fx.experimental.symbolic_shapes:DimDynamic")
    tracked = find("torch._dynamo.variables.builder:TrackedFake")
    decide = find("torch._dynamo.variables.builder:process_automatic_dynamic")
    entry = find("torch._dynamo.pgo:FrameStateSizeEntry")
    moved = find("torch._dynamo.pgo:auto_dynamic")
    env_kind = find("torch.fx.experimental.symbolic_shapes:ShapeEnv")
    find("torch._dynamo.guards:GuardBuilder.TYPE_MATCH")
    find("torch._dynamo.source:is_constant_source")
    find("torch._dynamo.source:is_from_defaults")
    takes(decide, "tx", "name", "entry")
    takes(env_kind.create_unspecified_symbol, "self", "val", "source", "dynamic_dim")
    takes(env_kind.create_symfloatnode, "self", "sym")
    fields = inspect.signature(GraphArg).parameters
    if not {"pass_arg_as_tensor", "is_tensor", "example_strong_ref"} <= fields.keys():
        raise Missing("GraphArg has other fields")

    def wrap_float(original: Hook, self: Any, value: float) -> Any:
        if (
            self.name in self.tx.output.unspec_variable_map
            or config.specialize_float
            or not math.isfinite(value)
            or not _moves(self)
        ):
            return original(self, value)
        tx, source = self.tx, self.source
        seen = decide(tx, name_of(source), entry.make_scalar(value))
        env = tx.output.shape_env
        symbol = env.create_unspecified_symbol(
            value, source=source, dynamic_dim=DimDynamic.DYNAMIC
        )
        number = env.create_symfloatnode(symbol, hint=value, source=source)
        tx.output.tracked_fakes.append(tracked(number, source, None))
        install(source, GuardBuilder.TYPE_MATCH)
        name = re.sub(r"[^a-zA-Z0-9]+", "_", self.name)
        tracer = tx.output.root_tracer
        proxy = tracer.create_graph_input(name, type(number), number, source=source)
        tracer.bound_symbols[symbol] = proxy
        variable = SymNodeVariable.create(tx, proxy, number, source=source)
        tx.output.unspec_variable_map[self.name] = variable
        proxy.node.meta["grapharg"] = GraphArg(
            source,
            number,
            pass_arg_as_tensor=False,
            fake_tensor=None,
            is_tensor=False,
            example_strong_ref=number,
        )
        if seen.scalar is moved:
            note_moved(tx, proxy.node)
        tracing.symbols.append(name_of(source))
        return variable

    patcher.around(kind, "wrap_symfloat", wrap_float, "self", "value")
    home = find("torch._dynamo.convert_frame")
    patcher.outside(home, "compile_frame", _again, "code", "globals")


@patch(
    "counter-symbols",
    "integers that a step counts are symbols from the start",
    "a step that counts in Python is compiled twice more",
    needs=(FLOATS,),
)
def COUNTERS(patcher: Patcher) -> None:
    kind = find("torch._dynamo.variables.builder:VariableBuilder")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    DimDynamic = find("torch.fx.experimental.symbolic_shapes:DimDynamic")

    def wrap_int(original: Hook, self: Any, value: int, *args: Any, **more: Any) -> Any:
        tx, source = self.tx, self.source
        counters = patch_state.counters.get(tx.output.root_tx.f_code, ())
        if args or more or not _moves(self):
            return original(self, value, *args, **more)
        name = name_of(source)
        counted = _pattern(source) in counters or is_counted(value, name)
        if counted or _is_foreign(tx, source):
            tracing.symbols.append(name)
            more = {"dynamism": DimDynamic.DYNAMIC}
        variable = original(self, value, *args, **more)
        if isinstance(variable, SymNodeVariable):
            note_moved(tx, variable.proxy.node)
        return variable

    patcher.around(kind, "wrap_symint", wrap_int, "self", "value", "dynamism")


def _pattern(source: Any) -> str:
    """Return the path to a number, with `*` for each key that is not a string.

    It is the same for all groups and parameters.
    """
    base = getattr(source, "base", None)
    if base is None:
        return name_of(source)
    # gives the kind of the object, and is no step of the path
    if name_of(base) == name_of(source):
        return _pattern(base)
    step = getattr(source, "member", None) or getattr(source, "index", None)
    return f"{_pattern(base)}.{step if isinstance(step, str) else '*'}"


@patch(
    "found-counters",
    "integers that a step replaces are found while it is traced",
    "a step that counts in Python is compiled twice more",
    needs=(COUNTERS,),
)
def FOUND_COUNTERS(patcher: Patcher) -> None:
    """Trace each integer that the step replaces by another one as a symbol.

    The trace begins anew at the first such integer, which is in the first iteration of
    a loop over lanes.
    """
    anew = find("torch._dynamo.exc:SpeculationRestartAnalysis")
    optimizer = find("torch._dynamo.variables.optimizer:OptimizerVariable")
    AttrSource = find("torch._dynamo.source:AttrSource")
    DictGetItemSource = find("torch._dynamo.source:DictGetItemSource")
    base = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")

    def note(tx: Any, value: Any, source: Any) -> None:
        value = value.realize() if value.source is None else value
        if value.source is not None or not value.is_python_constant():
            return
        now, before = value.as_python_constant(), found_at(tx, source)
        if type(now) is not int or type(before) is not int or now == before:
            return
        counters = patch_state.counters.setdefault(tx.output.root_tx.f_code, set())
        pattern = _pattern(source)
        if pattern not in counters:
            counters.add(pattern)
            raise anew(restart_reason=f"{pattern} is counted")

    def active() -> bool:
        return traces_step() and not tracing.constants

    def item(original: Hook, self: Any, inst: Any) -> Any:
        value, owner, key = self.stack[-3:]
        if active() and getattr(owner, "source", None) and key.is_python_constant():
            name = key.as_python_constant()
            if isinstance(name, str):
                note(self, value, DictGetItemSource(owner.source, name))
        return original(self, inst)

    def attribute(original: Hook, self: Any, inst: Any) -> Any:
        value, owner = self.stack[-2:]
        if isinstance(owner, optimizer) and not _has_setter(owner, inst.argval):
            tracing.stores.add(inst.argval)
        if active() and getattr(owner, "source", None):
            note(self, value, AttrSource(owner.source, inst.argval))
        return original(self, inst)

    on_instruction(patcher, base, "STORE_SUBSCR", item)
    on_instruction(patcher, base, "STORE_ATTR", attribute)


def _has_setter(owner: Any, name: str) -> bool:
    """Does setting `name` run code of a class, such as a property's?"""
    descriptor = inspect.getattr_static(type(owner.value), name, None)
    return hasattr(type(descriptor), "__set__")


def on_instruction(patcher: Patcher, base: Any, name: str, hook: Hook) -> None:
    """Install a hook around the function that traces an instruction."""
    kinds = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for table in {id(k.dispatch_table): k.dispatch_table for k in kinds}.values():
        original: Any = table[dis.opmap[name]]
        if original is not None:
            takes(original, "self", "inst")
            patcher.item(table, dis.opmap[name], patcher.guarded(original, hook))


# ---------------------------------------------------------------- which have changed


def note_moved(tx: Any, node: Node) -> None:
    """Record that a number differs between calls, so that no guard fixes its value."""
    vars(tx.output).setdefault("fuseopt_moved", set()).add(node)


def has_moved(output: Any, node: Node) -> bool:
    """Has a number from which this one is computed changed since the first call?"""
    moved = vars(output).get("fuseopt_moved", ())
    pending, seen = [node], set()
    while pending:
        source = pending.pop()
        if source in moved:
            return True
        if source not in seen:
            seen.add(source)
            pending += source.all_input_nodes
    return False


# ---------------------------------------------------------------- without


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Treat numbers as constants until they have changed, within this context."""
    before, tracing.constants = tracing.constants, True
    try:
        yield
    finally:
        tracing.constants = before


class TraceAgain(Exception):
    """A trace with symbols cannot be compiled."""


def has_symbols() -> bool:
    """Does the running trace have numbers as symbols?"""
    return bool(tracing.symbols) and not tracing.constants


def symbol_sources() -> list[str]:
    """Return the sources of the running trace's symbols, such as "L['self'].t".

    The graph need not compute with them.
    """
    return [*tracing.symbols]


def _is_final(error: Exception) -> bool:
    """Did a backend fail with an error that constants do not avoid?

    That includes errors that fuseopt does not expect.
    """
    # imported only for an error, to keep the import light
    from ..errors import FuseoptError

    within = getattr(error, "inner_exception", None)
    if within is None or isinstance(within, TraceAgain):
        return False
    return not (isinstance(within, FuseoptError) and within.constants_help)


def _again(original: Hook, *args: Any, **kwargs: Any) -> Any:
    """Repeat a trace that fails with symbols, once and without symbols."""
    if not tracing.hooked:
        return original(*args, **kwargs)
    before, tracing.symbols = tracing.symbols, []
    try:
        return original(*args, **kwargs)
    except Exception as error:
        skipped = isinstance(error, find("torch._dynamo.exc:SkipFrame", ()))
        if skipped or not has_symbols() or _is_final(error):
            raise
        log.debug("a step is traced with constants: %s", error)
        with plainly():
            return original(*args, **kwargs)
    finally:
        tracing.symbols = before


def hint_of(x: Any) -> Any:
    """Return an example value of a symbolic number; any other value unchanged.

    Relies on the `hint` of a symbolic node; without it, returns 1.
    """
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        hint = getattr(x.node, "hint", None)
        return (1.0 if isinstance(x, torch.SymFloat) else 1) if hint is None else hint
    return x
