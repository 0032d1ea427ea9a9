"""Numbers of an optimizer enter a trace as symbols: a schedule compiles nothing anew.

Dynamo takes a float for a constant until it has changed, and compiles anew then. Here
floats that an optimizer holds are symbols from the first trace on, and so are integers
that its step counts. Where a step uses a number in a way that makes another structure
of it (an exponent, a size, a text) the number is a constant, which a guard holds to,
until it has changed once. What a step asks of a number is in outcomes.py.

A trace that cannot be followed with symbols is made once more without.

Checked with torch 2.13, and by name with 2.11. Where what a hook relies on is missing,
numbers are constants until they have changed.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import importlib
import inspect
import logging
import math
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch.fx import Node

from .dynamo import leads_to, traces_step
from .hooks import Hook, around, found_at, install, name_of
from .outcomes import (
    HOMES,
    WRITTEN,
    Unknown,
    guard_number,
    node_of,
    number_of,
    settled,
    truth,
)

log = logging.getLogger("fuseopt")

#: Calls of which a symbol may be an operand: by name, without `_foreach_` and `_`.
ARITHMETIC = frozenset(
    (
        "add sub mul div true_divide truediv rsub addcmul addcdiv lerp fma "
        "clamp clamp_min clamp_max maximum minimum where masked_fill fill full "
        "full_like scalar_tensor tensor as_tensor copy eq ne lt le gt ge neg "
        "iadd isub imul itruediv sym_ite"
    ).split()
)
#: Of these calls, the operands from which place on may not be symbols.
FIRST_ONLY = frozenset({"pow", "ipow", "float_power"})
#: Of these calls, the only operands that may be symbols.
VALUES = {"full": (1, "fill_value"), "full_like": (1, "fill_value")}


class _Tracing(threading.local):
    def __init__(self) -> None:
        #: are numbers constants, as Dynamo has them?
        self.plainly = False
        #: where the numbers are found that the trace has as symbols
        self.symbols: list[str] = []


_tracing = _Tracing()
#: By code, the integers that it counts: patterns of where they are found.
_counters: weakref.WeakKeyDictionary[CodeType, set[str]] = weakref.WeakKeyDictionary()


def trace_symbols(backend: Callable[..., Any]) -> None:
    """Put the hooks in place; they act where a step is traced for `backend`."""
    try:
        _trace_again(backend)
    except (ImportError, AttributeError):
        return  # what fails with symbols could not be traced without
    for put in (
        _make_symbols,
        _find_counters,
        _answer_exactly,
        _settle_operands,
        _trace_functions,
    ):
        with contextlib.suppress(ImportError, AttributeError):
            put()


def _moves(builder: Any) -> bool:
    """May a number that Dynamo is about to take in be a symbol from now on?"""
    from torch._dynamo import config
    from torch._dynamo.source import is_constant_source, is_from_defaults

    source = builder.source
    return (
        traces_step()
        and not _tracing.plainly
        and bool(config.automatic_dynamic_shapes)
        and not is_constant_source(source)
        and not is_from_defaults(source)
        and _is_held(builder.tx, source)
    )


def _is_held(tx: Any, source: Any) -> bool:
    """Is a number found in an optimizer that the code has as a local?"""
    while getattr(source, "base", None) is not None:
        source = source.base
        if isinstance(found_at(tx, source), torch.optim.Optimizer):
            return True
    return False


# ---------------------------------------------------------------- symbols


def _make_symbols() -> None:
    """Floats are symbols, and so are integers that the step counts."""
    from torch._dynamo import config
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import (
        GraphArg,
        TrackedFake,
        VariableBuilder,
        process_automatic_dynamic,
    )
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    pgo: Any = importlib.import_module("torch._dynamo.pgo")
    entry, moved = pgo.FrameStateSizeEntry, pgo.auto_dynamic

    def wrap_float(original: Hook, self: Any, value: float) -> Any:
        if (
            self.name in self.tx.output.unspec_variable_map
            or config.specialize_float
            or not math.isfinite(value)
            or not _moves(self)
        ):
            return original(self, value)
        tx, source = self.tx, self.source
        seen = process_automatic_dynamic(tx, name_of(source), entry.make_scalar(value))
        env = tx.output.shape_env
        symbol = env.create_unspecified_symbol(
            value, source=source, dynamic_dim=DimDynamic.DYNAMIC
        )
        number = env.create_symfloatnode(symbol, hint=value, source=source)
        tx.output.tracked_fakes.append(TrackedFake(number, source, None))
        install(source, GuardBuilder.TYPE_MATCH)
        name = re.sub(r"[^a-zA-Z0-9]+", "_", self.name)
        tracer = tx.output.root_tracer
        proxy = tracer.create_graph_input(name, type(number), number, source=source)
        tracer.bound_symbols[symbol] = proxy
        made = SymNodeVariable.create(tx, proxy, number, source=source)
        tx.output.unspec_variable_map[self.name] = made
        proxy.node.meta["grapharg"] = GraphArg(
            source,
            number,
            pass_arg_as_tensor=False,
            fake_tensor=None,
            is_tensor=False,
            example_strong_ref=number,
        )
        if seen.scalar is moved:
            _note_moved(tx, proxy.node)
        _tracing.symbols.append(name_of(source))
        return made

    around(VariableBuilder, "wrap_symfloat", wrap_float)
    if "dynamism" not in inspect.signature(VariableBuilder.wrap_symint).parameters:
        return

    def wrap_int(original: Hook, self: Any, value: int, *args: Any, **more: Any) -> Any:
        known = _counters.get(self.tx.output.root_tx.f_code, ())
        if not args and not more and _pattern(self.source) in known and _moves(self):
            _tracing.symbols.append(name_of(self.source))
            more = {"dynamism": DimDynamic.DYNAMIC}
        made = original(self, value, *args, **more)
        if isinstance(made, SymNodeVariable):
            _note_moved(self.tx, made.proxy.node)
        return made

    around(VariableBuilder, "wrap_symint", wrap_int)


def _pattern(source: Any) -> str:
    """Where a number is found, with `*` for each key that is no name: the same for all
    groups and parameters.
    """
    base = getattr(source, "base", None)
    if base is None:
        return name_of(source)
    if name_of(base) == name_of(source):  # says what kind of object it is, no step
        return _pattern(base)
    step = getattr(source, "member", None) or getattr(source, "index", None)
    return f"{_pattern(base)}.{step if isinstance(step, str) else '*'}"


def _find_counters() -> None:
    """An integer that the step replaces by another one is traced as a symbol.

    The trace begins anew when it comes to the first such, which is in the first round
    of a loop over lanes.
    """
    from torch._dynamo.exc import SpeculationRestartAnalysis
    from torch._dynamo.source import AttrSource, DictGetItemSource
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase

    def note(tx: Any, value: Any, source: Any) -> None:
        value = value.realize() if value.source is None else value
        if value.source is not None or not value.is_python_constant():
            return
        now, before = value.as_python_constant(), found_at(tx, source)
        if type(now) is not int or type(before) is not int or now == before:
            return
        known = _counters.setdefault(tx.output.root_tx.f_code, set())
        pattern = _pattern(source)
        if pattern not in known:
            known.add(pattern)
            raise SpeculationRestartAnalysis(restart_reason=f"{pattern} is counted")

    def active() -> bool:
        return traces_step() and not _tracing.plainly

    def item(original: Hook, self: Any, inst: Any) -> Any:
        value, owner, key = self.stack[-3:]
        if active() and getattr(owner, "source", None) and key.is_python_constant():
            name = key.as_python_constant()
            if isinstance(name, str):
                note(self, value, DictGetItemSource(owner.source, name))
        return original(self, inst)

    def attribute(original: Hook, self: Any, inst: Any) -> Any:
        value, owner = self.stack[-2:]
        if active() and getattr(owner, "source", None):
            note(self, value, AttrSource(owner.source, inst.argval))
        return original(self, inst)

    _on_instruction(InstructionTranslatorBase, "STORE_SUBSCR", item)
    _on_instruction(InstructionTranslatorBase, "STORE_ATTR", attribute)


def _on_instruction(base: Any, name: str, hook: Hook) -> None:
    """Put a hook around what traces an instruction, where Dynamo looks it up."""
    kinds = [base]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for table in {id(k.dispatch_table): k.dispatch_table for k in kinds}.values():
        original: Any = table[dis.opmap[name]]

        def traced(self: Any, inst: Any, original: Any = original) -> Any:
            return hook(original, self, inst)

        table[dis.opmap[name]] = functools.wraps(original)(traced)


# ---------------------------------------------------------------- what is asked


def _answer_exactly() -> None:
    """What a trace asks of a number of the host is Python's answer, guarded."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.tensor import SymNodeVariable

    def evaluate(original: Hook, self: Any, *args: Any) -> Any:
        tx = _translator()
        if tx is not None and traces_step():
            node = node_of(self)
            with contextlib.suppress(Unknown):
                if node is not None:
                    return guard_number(tx, node)
        return original(self, *args)

    around(SymNodeVariable, "evaluate_expr", evaluate)


    codes = [
        name
        for name in dis.opmap
        if "JUMP" in name and "IF" in name and name.endswith(("TRUE", "FALSE", "POP"))
    ]
    for name in codes:
        _on_instruction(InstructionTranslatorBase, name, _jump)


def _jump(original: Hook, self: Any, inst: Any) -> Any:
    """A branch on a number of the host: one way, as long as the number says so."""
    value = self.stack[-1]
    found = truth(self, value) if traces_step() else None
    if found is None:
        return original(self, inst)
    from torch._dynamo.variables.constant import ConstantVariable

    before = len(self.stack)
    self.stack[-1] = ConstantVariable.create(found)
    done = original(self, inst)
    if len(self.stack) == before:  # `x or y` gives x itself
        self.stack[-1] = value
    return done


def _translator() -> Any:
    """What Dynamo traces the code of a frame with, now."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return InstructionTranslator.current_tx()
    except (ImportError, AttributeError):
        return None


# ---------------------------------------------------------------- what becomes of them


def constant(tx: Any, value: Any) -> Any:
    """A variable of Dynamo's that is a number which has not changed yet -> a constant
    with a guard; None for any other.
    """
    node = node_of(value) if traces_step() else None
    if node is None or _has_moved(tx.output, node):
        return None
    return settled(tx, value)


def _note_moved(tx: Any, node: Node) -> None:
    """A number is another one in other calls: it is never held to what it is."""
    vars(tx.output).setdefault("fuseopt_moved", set()).add(node)


def _has_moved(output: Any, node: Node) -> bool:
    """Has one of the numbers that this is computed from changed since the first call?"""
    moved = vars(output).get("fuseopt_moved", ())
    left, seen = [node], set()
    while left:
        now = left.pop()
        if now in moved:
            return True
        if now not in seen:
            seen.add(now)
            left += now.all_input_nodes
    return False


def _settle_operands() -> None:
    """In a call with tensors a symbol stands where it is an operand of arithmetic."""
    from torch._dynamo.output_graph import SubgraphTracer

    def create(original: Hook, self: Any, *given: Any, **named: Any) -> Any:
        if _tracing.symbols and traces_step() and len(given) == 4 and has_symbols():
            kind, target, args, kwargs = given
            if kind.startswith("call") and _is_arithmetic(target, args, kwargs) is False:
                args, kwargs = _settle(self.output_graph, target, args, kwargs)
                given = kind, target, args, kwargs
        return original(self, *given, **named)

    around(SubgraphTracer, "create_proxy", create)


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, dict):
        yield from _leaves(list(x.values()))
    else:
        yield x


def _is_arithmetic(target: Any, args: Any, kwargs: Any) -> bool | None:
    """Is it a function of numbers? None where there is no number that is a symbol."""
    symbols = tensors = False
    for x in _leaves((args, kwargs)):
        if isinstance(x, torch.fx.Proxy):
            value = x.node.meta.get("example_value")
            symbol = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
            symbols |= symbol
            tensors |= not symbol
    if not symbols:
        return None
    home = getattr(target, "__module__", None) or ""
    plain = home in HOMES or target in WRITTEN or isinstance(target, str)
    return plain and not tensors


def _settle(output: Any, target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    name = name.partition(".")[0].removeprefix("_foreach_").strip("_")
    tx = output.current_tx

    def settle(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(settle(y) for y in x)
        if isinstance(x, dict):
            return {k: settle(y) for k, y in x.items()}
        if not isinstance(x, torch.fx.Proxy) or _has_moved(output, x.node):
            return x
        try:
            return guard_number(tx, x.node)
        except Unknown:
            return x

    if name in VALUES:
        place, key = VALUES[name]
        args = tuple(x if i == place else settle(x) for i, x in enumerate(args))
        return args, {k: x if k == key else settle(x) for k, x in kwargs.items()}
    if name in FIRST_ONLY:
        return (*args[:1], *map(settle, args[1:])), settle(kwargs)
    if name in ARITHMETIC:
        return args, kwargs
    return tuple(map(settle, args)), settle(kwargs)


#: Functions of Python's own that give a float; those that Dynamo knows stay its own.
FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "pow", "hypot", "fmod"),
    *("atan2", "copysign", "cbrt", "erf", "erfc", "asinh", "acosh", "atanh"),
    *("degrees", "radians", "gamma", "lgamma", "fabs", "ldexp", "fsum", "dist"),
)


def _trace_functions() -> None:
    """Functions of `math` of numbers of the host stay what they are."""
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    handlers: Any = TorchInGraphFunctionVariable._get_handlers()

    def stay(function: Any, own: Any) -> Any:
        def handle(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = [x.realize() for x in args]
            if (
                traces_step()
                and not kwargs
                and any(isinstance(x, SymNodeVariable) for x in given)
                and all(
                    isinstance(x, SymNodeVariable) or x.is_python_constant()
                    for x in given
                )
            ):
                proxy = tx.output.create_proxy(
                    "call_function", function, tuple(x.as_proxy() for x in given), {}
                )
                try:
                    if type(number_of(tx, proxy.node)) is float:
                        symbol = tx.output.shape_env.create_unbacked_symfloat()
                        return SymNodeVariable.create(tx, proxy, symbol)
                except Unknown:
                    pass
                tx.output.remove_node(proxy.node)
            return own(this, tx, *args, **kwargs) if own else None

        return handle

    for name in FUNCTIONS:
        function = getattr(math, name, None)
        if function is not None:
            handlers[function] = stay(function, handlers.get(function))


# ---------------------------------------------------------------- without


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Within this, numbers are constants until they have changed."""
    before, _tracing.plainly = _tracing.plainly, True
    try:
        yield
    finally:
        _tracing.plainly = before


class TraceAgain(Exception):
    """What was traced with symbols cannot be compiled so."""


def has_symbols() -> bool:
    """Does the trace that goes on now have numbers as symbols that could be constants?"""
    return bool(_tracing.symbols) and not _tracing.plainly


def symbol_sources() -> list[str]:
    """Where numbers are found that the trace which goes on now has as symbols, whether
    or not its graph computes with them: "L['self'].t".
    """
    return [*_tracing.symbols]


def _trace_again(backend: Callable[..., Any]) -> None:
    """A trace with symbols that fails is made once more without."""
    converter: Any = importlib.import_module("torch._dynamo.convert_frame")
    trace = converter._compile

    @functools.wraps(trace)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if not any(leads_to(x, backend) for x in args if callable(x)):
            return trace(*args, **kwargs)
        before, _tracing.symbols = _tracing.symbols, []
        try:
            return trace(*args, **kwargs)
        except Exception as error:
            if not has_symbols():
                raise
            log.debug("a step is traced with constants: %s", error)
            with plainly():
                return trace(*args, **kwargs)
        finally:
            _tracing.symbols = before

    converter._compile = traced
