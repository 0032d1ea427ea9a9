"""Numbers of the host: rates, bias corrections, counters, as expressions of Python.

The numbers of a step are a list. Each is an argument of the call, a number read from a
tensor, or a function of earlier ones. `formulas` formats them for people, and
`evaluator` makes the function that computes them at each call. Both use exactly the
functions that the step calls, in its order, so that they have Python's bits.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Number = int | float | bool


@dataclass(frozen=True)
class Sym:
    """Represents number `index` of a step; `is_float` is its Python type."""

    index: int
    is_float: bool

    @property
    def kind(self) -> type:
        """Python type of the number in arithmetic."""
        return float if self.is_float else int


@dataclass(frozen=True)
class Item:
    """Read tensor `position` of the call's tensors with `.item()`."""

    position: int
    name: str = field(default="", compare=False)


@dataclass(frozen=True)
class Arg:
    """Argument `position` of the call, a Python number."""

    position: int
    name: str = field(default="", compare=False)


@dataclass(frozen=True, eq=False)
class Apply:
    """A call `function(*args, **kwargs)`, whose args may hold Syms of lower index.

    Compared by identity: arguments that are equal numbers may still be different (1 and
    1.0, 0.0 and -0.0).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Expr = Item | Arg | Apply

#: Python's precedences: comparisons, sums, products, signs, powers, names.
COMPARISON, SUM, PRODUCT, SIGN, POWER, NAME = range(6)
#: Functions that Python writes as an infix operator.
INFIX: dict[Any, tuple[str, int]] = {
    operator.lt: ("<", COMPARISON),
    operator.le: ("<=", COMPARISON),
    operator.gt: (">", COMPARISON),
    operator.ge: (">=", COMPARISON),
    operator.eq: ("==", COMPARISON),
    operator.ne: ("!=", COMPARISON),
    operator.add: ("+", SUM),
    operator.iadd: ("+", SUM),
    operator.sub: ("-", SUM),
    operator.isub: ("-", SUM),
    operator.mul: ("*", PRODUCT),
    operator.imul: ("*", PRODUCT),
    operator.truediv: ("/", PRODUCT),
    operator.itruediv: ("/", PRODUCT),
    operator.floordiv: ("//", PRODUCT),
    operator.ifloordiv: ("//", PRODUCT),
    operator.mod: ("%", PRODUCT),
    operator.imod: ("%", PRODUCT),
    operator.pow: ("**", POWER),
    operator.ipow: ("**", POWER),
}
#: A longer formula is replaced by its name in other formulas.
LONGEST = 60


def syms(x: Any) -> list[int]:
    """Return the indices of the numbers in an argument, in lists or not."""
    if isinstance(x, Sym):
        return [x.index]
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return []
    return [i for y in x for i in syms(y)]


def _infix(expr: Apply) -> tuple[str, int] | None:
    """Return the infix operator of a call and its precedence; None if it has none."""
    two = len(expr.args) == 2 and not expr.kwargs
    return INFIX.get(expr.function) if two else None


def _is_plain(x: Any) -> bool:
    """Does Python's repr of a constant evaluate to the same constant?"""
    return type(x) in (int, bool, type(None)) or (type(x) is float and math.isfinite(x))


# ---------------------------------------------------------------- for people


def formulas(numbers: Sequence[Expr], wanted: Iterable[int]) -> dict[int, str]:
    """Format some of the numbers as text: `lr / (1 - 0.9 ** t)`.

    The text is a Python expression with the number's bits. It uses the names of
    arguments and tensors, and `sym3` where number 3 is too long to be repeated.
    """
    wanted = list(wanted)
    needed: set[int] = set()
    todo = list(wanted)
    while todo:
        i = todo.pop()
        if i not in needed:
            needed.add(i)
            expr = numbers[i]
            todo += syms((expr.args, expr.kwargs)) if isinstance(expr, Apply) else []
    texts: dict[int, tuple[str, int]] = {}
    for i in sorted(needed):
        texts[i] = _formula(numbers[i], texts)
    return {i: texts[i][0] for i in wanted}


def _formula(expr: Expr, texts: dict[int, tuple[str, int]]) -> tuple[str, int]:
    """Return the text of a number, and the precedence of its outermost part."""
    if isinstance(expr, Item):
        return expr.name or f"item{expr.position}", NAME
    if isinstance(expr, Arg):
        return expr.name or f"arg{expr.position}", NAME

    def operand(x: Any) -> tuple[str, int]:
        if isinstance(x, Sym):
            text = texts[x.index]
            return text if len(text[0]) <= LONGEST else (f"sym{x.index}", NAME)
        if isinstance(x, (list, tuple)):
            inside = "".join(f"{operand(y)[0]}, " for y in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]", NAME
        constant = repr(x)
        return constant, SIGN if constant.startswith("-") else NAME

    def bound(x: Any, least: int) -> str:
        text, binds = operand(x)
        return text if binds >= least else f"({text})"

    infix = _infix(expr)
    if infix is not None:
        sign, binds = infix
        left, right = binds, binds + 1
        if binds == POWER:
            left, right = NAME, SIGN
        elif binds == COMPARISON:
            left += 1
        a, b = expr.args
        return f"{bound(a, left)} {sign} {bound(b, right)}", binds
    if expr.function is operator.neg:
        return f"-{bound(expr.args[0], SIGN)}", SIGN
    name = getattr(expr.function, "__name__", "call").strip("_").removeprefix("sym_")
    arguments = [operand(x)[0] for x in expr.args]
    arguments += [f"{k}={operand(x)[0]}" for k, x in expr.kwargs.items()]
    return f"{name}({', '.join(arguments)})", NAME


# ---------------------------------------------------------------- for each call

#: (arguments of a call, a function from an index to its tensor) -> all numbers
Evaluator = Callable[[Sequence[Any], Callable[[int], Any]], list[Number]]


def evaluator(numbers: Sequence[Expr]) -> Evaluator:
    """Return a function that computes the numbers of a call, in order.

    Each operation is one Python statement, with the operators and functions of the
    step.
    """
    names: dict[str, Any] = {}

    def text(x: Any) -> str:
        if isinstance(x, Sym):
            return f"n{x.index}"
        if isinstance(x, (list, tuple)):
            inside = "".join(f"{text(y)}, " for y in x)
            return f"({inside})" if isinstance(x, tuple) else f"[{inside}]"
        if _is_plain(x):
            return f"({x!r})"
        return named(x)

    def named(x: Any) -> str:
        name = f"c{len(names)}"
        names[name] = x
        return name

    lines = ["def evaluate(args, tensor):"]
    for i, expr in enumerate(numbers):
        if isinstance(expr, Item):
            value = f"tensor({expr.position}).item()"
        elif isinstance(expr, Arg):
            value = f"args[{expr.position}]"
        elif infix := _infix(expr):
            value = f" {infix[0]} ".join(map(text, expr.args))
        else:
            arguments = [text(x) for x in expr.args]
            arguments += [f"{k}={text(x)}" for k, x in expr.kwargs.items()]
            value = f"{named(expr.function)}({', '.join(arguments)})"
        lines.append(f"    n{i} = {value}")
    lines.append(f"    return [{', '.join(f'n{i}' for i in range(len(numbers)))}]")
    exec(compile("\n".join(lines), "<numbers of a step>", "exec"), names)
    evaluate: Evaluator = names["evaluate"]
    return evaluate
