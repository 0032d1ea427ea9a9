"""Compare the classes, the state and the groups of an optimizer with the last call's.

Dynamo does not guard the methods that a step calls. If a class gets a new method, or a
method gets new code, the traced code would still run. A user may also replace the state
or the list of groups, for example by loading a state dict. Code for the old objects
would then only count towards Dynamo's recompile limit. Each call compares all of them
by identity, in a few fast C calls.
"""

from __future__ import annotations

import ctypes
import functools
import types
from array import array
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch.optim import Optimizer

from .. import compat
from ..compat.facts import Fact, attributes, result
from ..runtime.guards.library import ContainerRecord
from ..runtime.guards.tensors import address
from .change import SAME, Change, Difference
from .contents import Contents, comparison_in_c

_CODE = attrgetter("__code__")


NEW_CLASS = Difference(Change.STRUCTURE, "the optimizer has another class")
NEW_STATE = Difference(Change.STRUCTURE, "its state is another dict")
NEW_GROUPS = Difference(Change.STRUCTURE, "its groups are another list, or more")
NEW_ATTRIBUTE = Difference(Change.STRUCTURE, "an attribute of its class has changed")
NEW_CODE = Difference(Change.STRUCTURE, "a method of its class has other code")
#: Types whose values Dynamo guards.
VALUES = frozenset({int, float, bool, str, complex, bytes})


class StructureGuard:
    """The classes of an optimizer with their attributes, its state and its groups."""

    def __init__(self) -> None:
        self._state: Any = None
        self._groups: Any = None
        self._n = 0
        self._kind: type | None = None
        self._classes: list[type] = []
        #: live views of the values of each class's dict
        self._views: list[Any] = []
        self._held: list[Any] = []
        self._functions: list[types.FunctionType] = []
        self._codes: list[types.CodeType] = []
        #: the comparisons of the classes' dicts and of the codes in C
        self._in_c: tuple[Callable[[], int], Callable[[], int]] | None = None
        self._kept: Any = None  # what these read

    @property
    def known(self) -> bool:
        """Has `take` recorded an optimizer since the last `forget`?"""
        return self._kind is not None

    def forget(self) -> None:
        """Release all objects."""
        self._kind = self._state = self._groups = None

    def compare(
        self, optimizer: Optimizer, helper: ctypes.PyDLL | None = None
    ) -> Difference:
        """Compare an optimizer with the recorded one; return SAME or STRUCTURE.

        Compares the state, the list of groups and its length, the class, and the
        objects and code of its classes. `helper`: the library of the guards.
        """
        groups = optimizer.param_groups
        if self._kind is not type(optimizer):
            return NEW_CLASS
        if self._state is not optimizer.state:
            return NEW_STATE
        if self._groups is not groups or self._n != len(groups):
            return NEW_GROUPS
        in_c = self._in_c
        if in_c is not None and in_c[0]() and in_c[1]():
            return SAME
        if sum(map(len, self._views)) != len(self._held):
            return NEW_ATTRIBUTE
        changed = not all(map(is_, chain.from_iterable(self._views), self._held))
        if changed and not self._only_values():
            return NEW_ATTRIBUTE
        if not all(map(is_, map(_CODE, self._functions), self._codes)):
            return NEW_CODE
        self._in_c = None
        if helper is not None and not changed:
            self._compare_in_c(helper)
        return SAME

    def facts(self) -> list[Fact] | None:
        """Return the facts of which SAME follows, for an optimizer of the same class,
        state and groups; None while Python compares its classes.
        """
        if self._in_c is None:
            return None
        own = attributes(self, "_in_c", "_kind", "_state", "_groups", "_n")
        return [*own, *(result(1, compare) for compare in self._in_c)]

    def take(self, optimizer: Optimizer) -> None:
        """Record an optimizer for `compare`.

        A caller that drops code compiled for earlier objects drops it first, in case an
        exception comes in between.
        """
        self._kind = None
        groups = optimizer.param_groups
        self._state, self._groups, self._n = optimizer.state, groups, len(groups)
        self._read(type(optimizer))

    def _compare_in_c(self, helper: ctypes.PyDLL) -> None:
        """Let the helper compare the classes from now on, which have just matched."""
        dicts = [compat.dict_of_class(c) for c in self._classes]
        contents, struct = Contents(dicts), ContainerRecord()
        if None in dicts or not contents.fill(struct):
            return
        ids = [array("Q", map(id, x)) for x in (self._functions, self._codes)]
        codes = helper.fuseopt_codes
        codes.restype = ctypes.c_int64
        codes.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
        self._in_c = (
            comparison_in_c(helper, struct),
            functools.partial(codes, len(self._codes), *map(address, ids)),
        )
        self._kept = contents, ids

    def _only_values(self) -> bool:
        """Did only numbers and strings change, whose values Dynamo guards?"""
        values = [*chain.from_iterable(self._views)]
        pairs = zip(values, self._held, strict=True)
        if any(x is not y and not _alike(x, y) for x, y in pairs):
            return False
        self._held = values
        return True

    def _read(self, kind: type) -> None:
        inside = kind.__mro__[: kind.__mro__.index(Optimizer)]
        mixed_in = kind.__mro__[kind.__mro__.index(Optimizer) + 1 :]
        classes = [*inside, *(c for c in mixed_in if c is not object)]
        self._in_c, self._classes = None, classes
        self._views = [vars(c).values() for c in classes]
        self._held = [*chain.from_iterable(self._views)]
        bare = [
            x.__func__ if isinstance(x, (staticmethod, classmethod)) else x
            for x in self._held
        ]
        self._functions = [x for x in bare if isinstance(x, types.FunctionType)]
        self._codes = list(map(_CODE, self._functions))
        self._kind = kind


def _alike(x: Any, y: Any) -> bool:
    """Are both numbers or strings of one type?"""
    return type(x) is type(y) and type(x) in VALUES
