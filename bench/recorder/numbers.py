"""Numbers that a recorded step computes with, and what it asks of them.

A number has a value now, a node in the graph, and an expression that computes it at
later calls. Arithmetic gives another number. Whatever needs a plain value (a branch, an
index, a text, `float(x)`) fixes it: the recording holds as long as that value does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Refused(Exception):
    """The recorder cannot record this step; Dynamo is to trace it.

    The step's code may catch it: `last` has it then.
    """

    last: Refused | None = None

    def __init__(self, why: str) -> None:
        super().__init__(why)
        Refused.last = self


class Expr:
    """A number of later calls: a `leaf` (a place of the optimizer's), a number read
    from a tensor (`item`, a place in the tensor log), or `function(*args)`.
    """

    __slots__ = ("args", "function", "item", "leaf")

    def __init__(
        self,
        leaf: int = -1,
        item: int = -1,
        function: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
    ) -> None:
        self.leaf = leaf
        self.item = item
        self.function = function
        self.args = args


def evaluate(
    expr: Expr, leaves: Sequence[Any], item: Callable[[int], Any], known: dict[Any, Any]
) -> Any:
    """The number of an expression, in a call with these leaves."""
    key = id(expr)
    if key not in known:
        if expr.leaf >= 0:
            known[key] = leaves[expr.leaf]
        elif expr.item >= 0:
            known[key] = item(expr.item)
        else:
            assert expr.function is not None
            known[key] = expr.function(
                *(
                    evaluate(x, leaves, item, known) if isinstance(x, Expr) else x
                    for x in expr.args
                )
            )
    return known[key]


class Number:
    """What floats and integers of a recording have in common."""

    record: Any  # the recording
    expr: Expr
    make: Callable[[], Any]  # makes the node
    is_float: bool

    def __init__(
        self, record: Any, value: Any, expr: Expr, make: Callable[[], Any]
    ) -> None:
        self.record = record
        self._value = value
        self.expr = expr
        self.make = make
        self._node: Any = None

    @property
    def fx(self) -> Any:
        """The node of the number, made when it is first needed."""
        if self._node is None:
            self._node = self.make()
        return self._node

    @property
    def value(self) -> Any:
        """The value now. Raises Refused for one that only kernels know."""
        if self._value is None:
            self._value = self.record.value_of(self.expr)
        return self._value

    def fix(self) -> Any:
        """The value, which later calls must have too."""
        return self.record.fixed(self)

    def __bool__(self) -> bool:
        return bool(self.record.outcome(bool, (self,)))

    def __hash__(self) -> int:
        return hash(self.fix())

    def __index__(self) -> int:
        return operator.index(self.fix())

    def __int__(self) -> int:
        return int(self.fix())

    def __float__(self) -> float:
        return float(self.fix())

    def __str__(self) -> str:
        return str(self.fix())

    def __repr__(self) -> str:
        return repr(self.fix())

    def __format__(self, spec: str) -> str:
        return format(self.fix(), spec)

    def __round__(self, n: Any = None) -> Any:
        return round(self.fix(), n)

    def __trunc__(self) -> int:
        return math.trunc(self.fix())

    def __floor__(self) -> int:
        return math.floor(self.fix())

    def __ceil__(self) -> int:
        return math.ceil(self.fix())

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise Refused("it pickles a number")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Refused(f"it takes the attribute {name} of a number")


def _binary(function: Callable[..., Any]) -> tuple[Any, Any]:
    def forward(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        return self.record.apply(function, (self, other))

    def reflected(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        return self.record.apply(function, (other, self))

    return forward, reflected


def _compared(function: Callable[..., Any]) -> Any:
    def compare(self: Any, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented
        if not isinstance(other, (int, float)):
            return function(self.fix(), other)
        return self.record.outcome(function, (self, other))

    return compare


for _name in "add sub mul truediv floordiv mod pow".split():
    _function = getattr(operator, _name)
    _forward, _reflected = _binary(_function)
    setattr(Number, f"__{_name}__", _forward)
    setattr(Number, f"__r{_name}__", _reflected)
for _name in "lt le gt ge eq ne".split():
    setattr(Number, f"__{_name}__", _compared(getattr(operator, _name)))


def _unary(function: Callable[..., Any]) -> Any:
    def result(self: Any) -> Any:
        return self.record.apply(function, (self,))

    return result


for _name in "neg pos abs".split():
    setattr(Number, f"__{_name}__", _unary(getattr(operator, _name)))


class FloatNumber(Number, torch.SymFloat):
    """Stands for a float, as `isinstance` sees it too."""

    is_float = True

    @property
    def __class__(self) -> type:
        return float


class IntNumber(Number, torch.SymInt):
    """Stands for an int, as `isinstance` sees it too."""

    is_float = False

    @property
    def __class__(self) -> type:
        return int


for _kind in (FloatNumber, IntNumber):
    # an inherited operator of torch's would ask the symbol's node
    for _name in dir(Number):
        if _name.startswith("__") and callable(vars(Number).get(_name)):
            if _name not in ("__init__", "__class__"):
                setattr(_kind, _name, vars(Number)[_name])

#: Functions of `math` whose result is a number of the recording.
MATH = (
    *("sqrt", "exp", "exp2", "expm1", "log", "log10", "log2", "log1p", "pow"),
    *("hypot", "fmod", "copysign", "cbrt", "sin", "cos", "tan", "tanh", "sinh"),
    *("cosh", "asin", "acos", "atan", "atan2", "erf", "erfc", "fabs", "ldexp"),
)


def is_number(x: Any) -> bool:
    """Is it a number of a recording?"""
    return Number in type(x).__mro__


class SymbolicMath:
    """Has functions of `math` take numbers of a recording while it is entered."""

    def __init__(self, record: Any) -> None:
        self.record = record
        self.before: dict[str, Any] = {}

    def _taking(self, original: Any) -> Any:
        record = self.record

        def function(*args: Any) -> Any:
            if any(map(is_number, args)):
                return record.apply(original, args)
            return original(*args)

        return function

    def __enter__(self) -> None:
        for name in MATH:
            if hasattr(math, name):
                self.before[name] = getattr(math, name)
                setattr(math, name, self._taking(self.before[name]))

    def __exit__(self, *_: object) -> None:
        for name, original in self.before.items():
            setattr(math, name, original)
