"""Trace uses of symbolic numbers: operands of arithmetic, branches, functions of math.

In a call with tensors a symbol stands where arithmetic has an operand. Elsewhere it
becomes a constant, which a guard holds to, unless it has changed before. A branch goes
one way, as long as the number says so, and functions of `math` stay what they are.

Checked with torch 2.13, and by name with 2.11. Where what a hook relies on is missing,
Dynamo does as ever.
"""

from __future__ import annotations

import contextlib
import dis
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .hooks import Hook, around
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
from .symbols import has_moved, has_symbols, make_symbols, on_instruction
from .tracing import traces_step

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


def trace_symbols(backend: Callable[..., Any]) -> None:
    """Numbers of an optimizer are symbols, where Dynamo traces for `backend`."""
    if not make_symbols(backend):
        return
    for put in (_answer_exactly, _settle_operands, _trace_functions):
        with contextlib.suppress(ImportError, AttributeError):
            put()


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
        on_instruction(InstructionTranslatorBase, name, _jump)


def _jump(original: Hook, self: Any, inst: Any) -> Any:
    """A branch on a number of the host: one way, as long as the number says so."""
    value = self.stack[-1]
    outcome = truth(self, value) if traces_step() else None
    if outcome is None:
        return original(self, inst)
    from torch._dynamo.variables.constant import ConstantVariable

    before = len(self.stack)
    self.stack[-1] = ConstantVariable.create(outcome)
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
    if node is None or has_moved(tx.output, node):
        return None
    return settled(tx, value)


def _settle_operands() -> None:
    """In a call with tensors a symbol stands where it is an operand of arithmetic."""
    from torch._dynamo.output_graph import SubgraphTracer

    def create(original: Hook, self: Any, *operands: Any, **named: Any) -> Any:
        if len(operands) == 4 and has_symbols() and traces_step():
            kind, *call = operands
            if kind.startswith("call") and _is_arithmetic(*call) is False:
                target, args, kwargs = call
                args, kwargs = _settle(self.output_graph, target, args, kwargs)
                operands = kind, target, args, kwargs
        return original(self, *operands, **named)

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
        if not isinstance(x, torch.fx.Proxy) or has_moved(output, x.node):
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

    def stay(function: Any, original: Any) -> Any:
        def handle(this: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            variables = [x.realize() for x in args]
            if (
                traces_step()
                and not kwargs
                and any(isinstance(x, SymNodeVariable) for x in variables)
                and all(
                    isinstance(x, SymNodeVariable) or x.is_python_constant()
                    for x in variables
                )
            ):
                proxy = tx.output.create_proxy(
                    "call_function",
                    function,
                    tuple(x.as_proxy() for x in variables),
                    {},
                )
                try:
                    if type(number_of(tx, proxy.node)) is float:
                        symbol = tx.output.shape_env.create_unbacked_symfloat()
                        return SymNodeVariable.create(tx, proxy, symbol)
                except Unknown:
                    pass
                tx.output.remove_node(proxy.node)
            return original(this, tx, *args, **kwargs) if original else None

        return handle

    for name in FUNCTIONS:
        function = getattr(math, name, None)
        if function is not None:
            handlers[function] = stay(function, handlers.get(function))
