"""Symbolic scalars of the host: a lr, an `.item()`, and Python arithmetic on them.

A `Sym` represents a Python number whose value exists only when the step is called.
Capture makes it from placeholders and `.item()` nodes. `Scalars` records arithmetic on
it as the expressions of `ir.expressions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...ir.expressions import Apply, Arg, Expr, Item, Sym

__all__ = ["Apply", "Arg", "Item", "Scalars", "Sym", "same_numbers"]


def _exactly(x: Any) -> Any:
    """Return a key that distinguishes numbers that Python considers equal."""
    if isinstance(x, (list, tuple)):
        return (type(x), *map(_exactly, x))
    if isinstance(x, dict):
        return tuple((k, _exactly(v)) for k, v in x.items())
    return x if isinstance(x, Sym) else (type(x), repr(x))


def same_numbers(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Are the numbers equal, with zeros of one sign? (0.0 and -0.0 give other
    products.)
    """
    if some != others:
        return False
    return 0 not in some or all(
        x != 0 or repr(x) == repr(y) for x, y in zip(some, others, strict=True)
    )


def _numbers(x: Any) -> list[Any]:
    """Return the numbers of arguments, in lists or not."""
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in _numbers(y)]
    return [x]


class Scalars:
    """Numbers of a step, in order: `exprs[i]` is the expression of Sym i."""

    def __init__(self) -> None:
        self.exprs: list[Expr] = []
        self._known: dict[Any, Sym] = {}

    def make(self, expr: Expr, is_float: bool, key: Any = None) -> Sym:
        """Return the Sym of an expression; expressions with one `key` have one Sym."""
        key = expr if key is None else key
        sym = self._known.get(key)
        if sym is None:
            sym = Sym(len(self.exprs), is_float)
            self.exprs.append(expr)
            self._known[key] = sym
        return sym

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
