"""What an optimizer's classes hold: has any of it changed since the last call?

Dynamo guards no method that a step calls: where a class is given another one, or a
method other code, what was traced goes on as before. It is compared at each call, and
so cheap that it may be: by identity, in calls of C.
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
    """What the classes of an optimizer held when `changed` was asked last."""

    def __init__(self) -> None:
        self._kind: type | None = None
        self._classes: list[type] = []
        self._held: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._codes: list[types.CodeType] = []

    def changed(self, optimizer: Optimizer) -> bool:
        """Is its class another one, or does one of them hold other objects or code?

        Not the first time.
        """
        held: list[Any] = []
        for c in self._classes:
            held += vars(c).values()
        if (
            self._kind is type(optimizer)
            and len(held) == len(self._held)
            and (all(map(is_, held, self._held)) or self._only_values(held))
            and all(map(is_, map(_CODE, self._functions), self._codes))
        ):
            return False
        first = self._kind is None
        self._look(type(optimizer))
        return not first

    def _only_values(self, held: list[Any]) -> bool:
        """Are numbers and texts, whose values Dynamo guards, all that changed?"""
        pairs = zip(held, self._held, strict=True)
        if any(x is not y and not _alike(x, y) for x, y in pairs):
            return False
        self._held = held
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
    """Are both numbers, or texts, of one type?"""
    return type(x) is type(y) and type(x) in VALUES
