"""Trace uses of symbolic numbers: operands of arithmetic, branches, functions of math.

In a call with tensors, an operand of arithmetic stays a symbol. Elsewhere a symbol
becomes a guarded constant, unless it has changed before. A branch goes one way, guarded
by the number, and functions of `math` stay unchanged.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import math
import operator
from collections.abc import Iterator
from typing import Any

import torch

from .leaving import refuse
from .names import attribute_of, find
from .outcomes import (
    HOMES,
    SYMBOLS,
    WRITTEN,
    Unknown,
    constant_of,
    guard_number,
    node_of,
    number_of,
    settled,
    truth,
)
from .patches import Hook, Patcher, patch
from .symbols import FLOATS, has_moved, has_symbols, on_instruction
from .tracing import traces_step

#: Calls that may have a symbol as an operand: by name, without `_foreach_` and `_`.
ARITHMETIC = frozenset(
    (
        "add sub mul div true_divide truediv rsub addcmul addcdiv lerp fma "
        "clamp clamp_min clamp_max maximum minimum where masked_fill fill full "
        "full_like scalar_tensor tensor as_tensor copy eq ne lt le gt ge neg "
        "iadd isub imul itruediv sym_ite"
    ).split()
)
#: For these calls, the index from which on operands may not be symbols.
FIRST_ONLY = frozenset({"pow", "ipow", "float_power"})
#: For these calls, the only operands that may be symbols.
VALUES = {"full": (1, "fill_value"), "full_like": (1, "fill_value")}


# ---------------------------------------------------------------- evaluation


@patch(
    "exact-answers",
    "what a step asks of its numbers is answered as Python answers it, with a guard",
    "numbers that move are constants until they have moved",
    needs=(FLOATS,),
)
def ANSWERS(patcher: Patcher) -> None:
    """Evaluate a number of the host in a trace as Python does, with a guard."""
    kind = find("torch._dynamo.variables.tensor:SymNodeVariable")
    base = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
    translator = find("torch._dynamo.symbolic_convert:InstructionTranslator")
    attribute_of(translator, "current_tx")

    def evaluate(original: Hook, self: Any, *args: Any) -> Any:
        if traces_step():
            node = node_of(self)
            with contextlib.suppress(Unknown):
                if node is not None:
                    return guard_number(translator.current_tx(), node)
        return original(self, *args)

    patcher.around(kind, "evaluate_expr", evaluate, "self")

    def extreme(original: Hook, self: Any, tx: Any, a: Any, b: Any) -> Any:
        picked = _picked(tx, self.fn, a, b) if traces_step() else None
        return original(self, tx, a, b) if picked is None else picked

    builtin = find("torch._dynamo.variables.builtin:BuiltinVariable")
    patcher.around(builtin, "_call_min_max_binary", extreme, "self", "tx", "a", "b")

    for name in dis.opmap:
        # from Python 3.14 on the table also has some that no code has, nor Dynamo
        jumps = "JUMP" in name and "IF" in name and hasattr(base, name)
        if jumps and name.endswith(("TRUE", "FALSE", "POP")):
            on_instruction(patcher, base, name, _jump)


def _picked(tx: Any, function: Any, a: Any, b: Any) -> Any:
    """Return the larger or the smaller of two numbers of different types, or None.

    Python returns one of the two unchanged. Dynamo's symbol of it is always a float.
    """
    nodes = [node_of(x) for x in (a, b)]
    operator_of = {max: operator.gt, min: operator.lt}
    if nodes == [None, None] or function not in operator_of:
        return None
    try:
        given = [
            x.as_python_constant() if node is None else node
            for x, node in zip((a, b), nodes, strict=True)
        ]
        if len({type(number_of(tx, x)) for x in given}) == 1:
            return None
        proxies = b.as_proxy(), a.as_proxy()
        proxy = tx.output.create_proxy(
            "call_function", operator_of[function], proxies, {}
        )
        takes_second = guard_number(tx, proxy.node)
    except (Unknown, NotImplementedError):
        return None
    tx.output.remove_node(proxy.node)
    return b if takes_second else a


@functools.cache
def _jumps_either_way() -> bool:
    """Does Dynamo jump in both cases if the truth of an object is a symbol?

    Before torch 2.13 it does. Relies on the text of its function.
    """
    jump = find("torch._dynamo.symbolic_convert:generic_jump", None)
    try:
        return jump is None or "if result.evaluate_expr():" in inspect.getsource(jump)
    except (OSError, TypeError):
        return True


def _has_own_truth(value: Any) -> bool:
    """Is it an object whose truth user code computes?"""
    # a list's `value` is a property that fails for tensors, before torch 2.13
    held = vars(value.realize()).get("value")
    says = getattr(type(held), "__bool__", None) or getattr(type(held), "__len__", None)
    return inspect.isfunction(says)


def _jump(original: Hook, self: Any, inst: Any) -> Any:
    """Trace a branch on a number of the host: one way, guarded by the number."""
    value = self.stack[-1]
    if _jumps_either_way() and traces_step() and _has_own_truth(value):
        refuse(self, "it branches on an object with __bool__")
    outcome = truth(self, value) if traces_step() else None
    if outcome is None:
        return original(self, inst)
    before = len(self.stack)
    self.stack[-1] = constant_of(outcome)
    done = original(self, inst)
    if len(self.stack) == before:  # `x or y` returns x itself
        self.stack[-1] = value
    return done


# ---------------------------------------------------------------- conversion


def constant(tx: Any, value: Any) -> Any:
    """Return a guarded constant for a number that has not changed yet, else None."""
    node = node_of(value) if traces_step() else None
    if node is None or has_moved(tx.output, node):
        return None
    return settled(tx, value)


@patch(
    "settled-operands",
    "a number is a symbol where arithmetic has an operand, and else a constant",
    "numbers that move are constants until they have moved",
    needs=(FLOATS,),
)
def OPERANDS(patcher: Patcher) -> None:
    """Keep a symbol in a call with tensors, if it is an operand of arithmetic."""
    kind = find("torch._dynamo.output_graph:SubgraphTracer")

    def create(original: Hook, self: Any, *operands: Any, **named: Any) -> Any:
        if len(operands) == 4 and has_symbols() and traces_step():
            kind, *call = operands
            if kind.startswith("call") and _is_arithmetic(*call) is False:
                target, args, kwargs = call
                args, kwargs = _settle(self.output_graph, target, args, kwargs)
                operands = kind, target, args, kwargs
        return original(self, *operands, **named)

    patcher.around(kind, "create_proxy", create, "self")


def _leaves(x: Any) -> Iterator[Any]:
    if isinstance(x, (list, tuple)):
        for y in x:
            yield from _leaves(y)
    elif isinstance(x, dict):
        yield from _leaves(list(x.values()))
    else:
        yield x


def _is_arithmetic(target: Any, args: Any, kwargs: Any) -> bool | None:
    """Is it a function of numbers? None if no number is a symbol."""
    symbols = tensors = False
    for x in _leaves((args, kwargs)):
        if isinstance(x, torch.fx.Proxy):
            value = x.node.meta.get("example_value")
            symbol = isinstance(value, SYMBOLS)
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


#: Python functions that return a float; Dynamo keeps its handlers for others.
FUNCTIONS = (
    *("exp", "exp2", "expm1", "log", "log10", "log1p", "pow", "hypot", "fmod"),
    *("atan2", "copysign", "cbrt", "erf", "erfc", "asinh", "acosh", "atanh"),
    *("degrees", "radians", "gamma", "lgamma", "fabs", "ldexp", "fsum", "dist"),
)


@patch(
    "symbolic-math",
    "functions of math of a number that moves stay symbolic",
    "a step that calls them is compiled anew at each value",
    needs=(FLOATS,),
)
def MATH(patcher: Patcher) -> None:
    """Keep functions of `math` on numbers of the host unchanged."""
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    in_graph = find("torch._dynamo.variables.torch:TorchInGraphFunctionVariable")
    find("torch.fx.experimental.symbolic_shapes:ShapeEnv.create_unbacked_symfloat")
    handlers = in_graph._get_handlers()

    def stay(function: Any) -> Any:
        def handle(
            original: Hook, this: Any, tx: Any, *args: Any, **kwargs: Any
        ) -> Any:
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
            return original(this, tx, *args, **kwargs)

        return handle

    for name in FUNCTIONS:
        function = getattr(math, name, None)
        if function is not None:
            patcher.handler(handlers, function, stay(function))
