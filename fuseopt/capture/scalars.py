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


@dataclass(frozen=True)
class Apply:
    """`function(*args)`, where args are numbers or Syms of lower index."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


class Scalars:
    """The scalar program of a step: `exprs[i]` computes Sym i from earlier ones."""

    def __init__(self) -> None:
        self.exprs: list[Item | Arg | Apply] = []
        self._known: dict[Any, Sym] = {}
        self._standins: dict[float, Sym] = {}

    def make(self, expr: Item | Arg | Apply, is_float: bool) -> Sym:
        known = self._known.get(expr)
        if known is None:
            known = Sym(len(self.exprs), is_float)
            self.exprs.append(expr)
            self._known[expr] = known
        return known

    def apply(self, function: Callable[..., Any], args: Sequence[Any]) -> Sym:
        """Record `function(*args)`; the result's type follows Python's arithmetic."""
        name = getattr(function, "__name__", str(function))
        is_float = (
            any(
                isinstance(a, float) or (isinstance(a, Sym) and a.is_float)
                for a in args
            )
            or "truediv" in name
            or "float" in name
            or "sqrt" in name
            or getattr(function, "__module__", "") == "math"
        )
        if "int" in name or name in ("floor", "ceil", "trunc", "round"):
            is_float = False
        return self.make(Apply(function, tuple(args)), is_float)

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

    def evaluate(self, args: Sequence[Any], tensors: Sequence[Any]) -> list[Number]:
        """The value of every Sym for one call; `.item()` only on CPU tensors."""
        values: list[Any] = []
        for expr in self.exprs:
            if isinstance(expr, Apply):
                got = [values[a.index] if isinstance(a, Sym) else a for a in expr.args]
                values.append(expr.function(*got))
            elif isinstance(expr, Item):
                values.append(tensors[expr.position].item())
            else:
                values.append(args[expr.position])
        return values
