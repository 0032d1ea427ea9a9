"""Does an optimizer of DTensors hold what it held when its parts were taken?

Asked in C, where that can be, and else in Python; both mean the same by it. The helper
also takes the parts of gradients, where they are spread as in the last call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import compress
from operator import attrgetter, is_, ne
from typing import Any

import torch

from .. import compat
from ..runtime.guards.parts import GRADIENTS, OTHER, PartGuard
from ..shadow.contents import Contents

_FLAG = attrgetter("requires_grad")
_VERSION = attrgetter("_version")


def _contents(tables: Sequence[Any], rows: Sequence[Any] = ()) -> Contents:
    """What dicts and lists hold now."""
    return Contents(tables, rows, [x.copy() for x in tables], [x.copy() for x in rows])


class Watch:
    """What an optimizer and its DTensors hold now.

    `both`: its attributes and its groups, each beside what stands for it, which follows
    numbers that move. `tables`, `rows`: the dicts of its state, and its lists. `whole`:
    its parameters that are DTensors, `inner`: those in its state. `heres`: what is
    stepped in the stead of each parameter.

    `look`, where that finds nothing `same`, `begin` and `count_up` belong to one step:
    the versions of parameters whose parts it changed are counted up.
    """

    def __init__(
        self,
        both: Sequence[tuple[dict[str, Any], dict[str, Any]]] = (),
        tables: Sequence[Any] = (),
        rows: Sequence[Any] = (),
        whole: Sequence[Any] = (),
        inner: Sequence[Any] = (),
        heres: Sequence[torch.Tensor] = (),
    ) -> None:
        self._both = both
        self._plain = _contents([theirs for theirs, _ in both])
        self._held = _contents(tables, rows)
        self._whole, self._heres = whole, heres
        self._seen = [*whole, *inner]
        self._locals = [*map(compat.local_part, self._seen)]
        self._specs = [*map(compat.spec_of, self._seen)]
        self._at = [*map(torch.Tensor.data_ptr, self._locals)]
        self._flags = [*map(_FLAG, whole)]
        self._guard: PartGuard | None = None
        self._guarded = False  # was one made?
        self._versions: list[int] = []  # before the step; none if the guard has them

    def look(self, helper: ctypes.PyDLL | None) -> list[Any] | None:
        """The parts of all gradients, if compiled code finds that all is as it was but
        for numbers. `helper`: the library of the guards.
        """
        if self._guard is None or not self._follow(helper):
            return None
        grads = self._guard.look()
        if grads is not None:
            self._versions = []
        return grads

    def _follow(self, helper: ctypes.PyDLL | None) -> bool:
        """Is what the optimizer holds besides parameters and state what it held, but
        for numbers? What stands for it gets these.
        """
        moved = self._plain.moved(helper)
        if moved:
            places = [(ours, key) for theirs, ours in self._both for key in theirs]
            for i, x in moved:
                ours, key = places[i]
                ours[key] = x
            self._plain = _contents([theirs for theirs, _ in self._both])
        return moved is not None

    def same(self, helper: ctypes.PyDLL | None) -> bool:
        """The same, asked from Python where compiled code has found a change."""
        found = None if self._guard is None else self._guard.found
        if not self._follow(helper):
            return False
        if found == GRADIENTS:
            return True
        same = (
            self._held.same(helper)
            and all(map(is_, map(compat.local_part, self._seen), self._locals))
            and all(map(is_, map(compat.spec_of, self._seen), self._specs))
            and [*map(torch.Tensor.data_ptr, self._locals)] == self._at
            and [*map(_FLAG, self._whole)] == self._flags
        )
        holdings = self._held.holdings
        if found == OTHER:
            self._guard = None  # it would see a change at each call where there is none
        elif same and not self._guarded and helper is not None and holdings is not None:
            self._guarded = True
            made = PartGuard(helper, self._seen, self._heres, holdings)
            self._guard = made if made.works else None
        return same

    def begin(self, specs: Sequence[Any]) -> None:
        """A step begins that `look` did not see; `specs`: of its gradients."""
        self._versions = [*map(_VERSION, self._heres)]
        if self._guard is not None:
            self._guard.expect(specs)

    def count_up(self) -> None:
        """The step has ended."""
        before: Sequence[int] = self._versions
        if not before and self._guard is not None:
            if self._guard.bump():
                return
            before = self._guard.versions
        changed = map(ne, map(_VERSION, self._heres), before)
        compat.bump_versions([*compress(self._whole, changed)])
