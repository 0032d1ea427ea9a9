"""Symbolic scalars of the host: a lr, an `.item()`, and Python arithmetic on them.

A `Sym` stands for a Python number that is known only when the step is called. It is
made by capture from placeholders and `.item()` nodes; arithmetic on it is recorded by
`Scalars` and replayed by `evaluate` with the very Python functions that eager uses, in
float64, so that the bits are eager's. A Sym never reaches ATen's dispatcher: capture
hands a *stand-in* number to torch and finds it again in the recorded call.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Number = int | float | bool


@dataclass(frozen=True)
class Sym:
    """Expression number `index` of a Scalars; `is_float` is its Python type."""

    index: int
    is_float: bool


@dataclass(frozen=True)
class Item:
    """Read tensor `position` of the call's tensors with `.item()`."""

    position: int


@dataclass(frozen=True)
class Arg:
    """Argument `position` of the call, a Python number."""

    position: int


@dataclass(frozen=True, eq=False)
class Apply:
    """`function(*args, **kwargs)`, where numbers in args may be Syms of lower index.

    Compared by identity: arguments that are equal numbers may be other numbers (1 and
    1.0, 0.0 and -0.0).
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _exactly(x: Any) -> Any:
    """A key that tells numbers apart that Python takes for equal."""
    if isinstance(x, (list, tuple)):
        return (type(x), *map(_exactly, x))
    if isinstance(x, dict):
        return tuple((k, _exactly(v)) for k, v in x.items())
    return x if isinstance(x, Sym) else (type(x), repr(x))


def same_numbers(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Are they equal, and zeros of one sign? (0.0 and -0.0 give other products.)"""
    if some != others:
        return False
    return 0 not in some or all(
        x != 0 or repr(x) == repr(y) for x, y in zip(some, others, strict=True)
    )


def _numbers(x: Any) -> list[Any]:
    """The numbers of arguments, in lists or not."""
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in _numbers(y)]
    return [x]


def _known_values(x: Any, values: Sequence[Any]) -> Any:
    """Arguments with the value of each Sym in its place."""
    if isinstance(x, Sym):
        return values[x.index]
    if isinstance(x, (list, tuple)):
        return type(x)([_known_values(y, values) for y in x])
    return x


class Scalars:
    """The scalar program of a step: `exprs[i]` computes Sym i from earlier ones."""

    def __init__(self) -> None:
        self.exprs: list[Item | Arg | Apply] = []
        self._known: dict[Any, Sym] = {}
        self._standins: dict[float, Sym] = {}

    def make(self, expr: Item | Arg | Apply, is_float: bool, key: Any = None) -> Sym:
        """The Sym of an expression; `key` is equal for those that are the same."""
        key = expr if key is None else key
        known = self._known.get(key)
        if known is None:
            known = Sym(len(self.exprs), is_float)
            self.exprs.append(expr)
            self._known[key] = known
        return known

    def apply(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any] | None = None,
    ) -> Sym:
        """Record a call; its result's type follows Python's arithmetic."""
        args, kwargs = tuple(args), kwargs or {}
        name = getattr(function, "__name__", str(function))
        numbers = _numbers([args, list(kwargs.values())])
        negative = isinstance(numbers[-1], int) and numbers[-1] < 0
        is_float = (
            any(
                isinstance(a, float) or (isinstance(a, Sym) and a.is_float)
                for a in numbers
            )
            or "truediv" in name
            or "float" in name
            or "sqrt" in name
            or ("pow" in name and negative)
            or getattr(function, "__module__", "") == "math"
        )
        if "int" in name or name in ("floor", "ceil", "trunc", "round"):
            is_float = False
        key = (function, _exactly(args), _exactly(kwargs))
        return self.make(Apply(function, args, kwargs), is_float, key)

    def standin(self, sym: Sym) -> float | int:
        """A number that stands for `sym` in a call to torch.

        It is far from 0 and 1, whose values torch may treat specially, and unlikely to
        be a literal of anyone's step.
        """
        if sym.is_float:
            value: float | int = 0.7390851332151607 + 1.0e-9 * (sym.index + 1)
        else:
            value = 740_000_007 + 13 * sym.index
        self._standins[value] = sym
        return value

    def find(self, value: Number) -> Sym | None:
        """The Sym that `value` stands for, or its negation; None for a plain number."""
        if isinstance(value, bool):
            return None
        if value in self._standins:
            return self._standins[value]
        if -value in self._standins:
            return self.apply(operator.neg, (self._standins[-value],))
        return None

    def evaluate(
        self, args: Sequence[Any], tensor: Callable[[int], Any]
    ) -> list[Number]:
        """The value of every Sym for one call; `.item()` only on CPU tensors.

        `tensor(i)`: tensor i of the call.
        """
        values: list[Any] = []
        for expr in self.exprs:
            if isinstance(expr, Apply):
                args_ = _known_values(expr.args, values)
                named = {k: _known_values(v, values) for k, v in expr.kwargs.items()}
                values.append(expr.function(*args_, **named))
            elif isinstance(expr, Item):
                values.append(tensor(expr.position).item())
            else:
                values.append(args[expr.position])
        return values
