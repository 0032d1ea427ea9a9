"""Compare the attributes of an optimizer's classes with those of the last call.

Dynamo does not guard the methods that a step calls: if a class gets another method, or
a method other code, the traced code would still run. They are compared at each call, by
identity and in C calls, which takes little time.
"""

from __future__ import annotations

import types
from operator import attrgetter, is_
from typing import Any

from torch.optim import Optimizer

_CODE = attrgetter("__code__")


#: Types of which Dynamo guards the values.
VALUES = frozenset({int, float, bool, str, complex, bytes})


class Methods:
    """The attributes of an optimizer's classes at the last call of `changed`."""

    def __init__(self) -> None:
        self._kind: type | None = None
        self._classes: list[type] = []
        self._held: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._codes: list[types.CodeType] = []

    def changed(self, optimizer: Optimizer) -> bool:
        """Has the optimizer another class, or a class other objects or code?

        False the first time.
        """
        values: list[Any] = []
        for c in self._classes:
            values += vars(c).values()
        if (
            self._kind is type(optimizer)
            and len(values) == len(self._held)
            and (all(map(is_, values, self._held)) or self._only_values(values))
            and all(map(is_, map(_CODE, self._functions), self._codes))
        ):
            return False
        first = self._kind is None
        self._look(type(optimizer))
        return not first

    def _only_values(self, values: list[Any]) -> bool:
        """Did only numbers and strings change, whose values Dynamo guards?"""
        pairs = zip(values, self._held, strict=True)
        if any(x is not y and not _alike(x, y) for x, y in pairs):
            return False
        self._held = values
        return True

    def _look(self, kind: type) -> None:
        self._kind = kind
        inside = kind.__mro__[: kind.__mro__.index(Optimizer)]
        mixed_in = kind.__mro__[kind.__mro__.index(Optimizer) + 1 :]
        self._classes = [*inside, *(c for c in mixed_in if c is not object)]
        self._held = [x for c in self._classes for x in vars(c).values()]
        bare = [getattr(x, "__func__", x) for x in self._held]
        self._functions = [x for x in bare if isinstance(x, types.FunctionType)]
        self._codes = list(map(_CODE, self._functions))


def _alike(x: Any, y: Any) -> bool:
    """Are both numbers or strings of one type?"""
    return type(x) is type(y) and type(x) in VALUES
