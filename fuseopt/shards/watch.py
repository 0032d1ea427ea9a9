"""Watch an optimizer of DTensors for changes since its local parts were read.

It is compared in C if possible, else in Python, with the same meaning. The C code also
reads the local parts of gradients, if their specs are those of the last call.
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


def _contents(tables: Sequence[Any], lists: Sequence[Any] = ()) -> Contents:
    """The present contents of dicts and lists."""
    return Contents(
        tables, lists, [x.copy() for x in tables], [x.copy() for x in lists]
    )


class Watch:
    """The contents of an optimizer and its DTensors, to be compared later.

    `pairs`: its attributes and each of its groups, with those of the local optimizer,
    to which changed numbers are copied. `tables`, `lists`: the dicts of its state, and
    its lists. `whole`: its parameters that are DTensors; `state_dtensors`: those in its
    state. `local_params`: the local optimizer's parameter for each of `whole`.

    In one step, `look` is called first; if it returns None, `same` and `begin`; at the
    end `count_up`, which increases the versions of parameters that were changed.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]] = (),
        tables: Sequence[Any] = (),
        lists: Sequence[Any] = (),
        whole: Sequence[Any] = (),
        state_dtensors: Sequence[Any] = (),
        local_params: Sequence[torch.Tensor] = (),
    ) -> None:
        self._pairs = pairs
        self._plain = _contents([source for source, _ in pairs])
        self._held = _contents(tables, lists)
        self._whole, self._local_params = whole, local_params
        self._seen = [*whole, *state_dtensors]
        self._locals = [*map(compat.local_part, self._seen)]
        self._specs = [*map(compat.spec_of, self._seen)]
        self._at = [*map(torch.Tensor.data_ptr, self._locals)]
        self._flags = [*map(_FLAG, whole)]
        self._guard: PartGuard | None = None
        self._guarded = False  # was one made?
        self._versions: list[int] = []  # before the step; none if the guard has them

    def look(self, helper: ctypes.PyDLL | None) -> list[Any] | None:
        """The local parts of all gradients if compiled code finds no changes except
        numbers; else None. `helper`: the library of the guards.
        """
        if self._guard is None or not self._follow(helper):
            return None
        grads = self._guard.look()
        if grads is not None:
            self._versions = []
        return grads

    def _follow(self, helper: ctypes.PyDLL | None) -> bool:
        """Are the attributes and groups unchanged except for numbers? These are copied
        to the local optimizer.
        """
        moved = self._plain.moved(helper)
        if moved:
            places = [
                (targets, key) for source, targets in self._pairs for key in source
            ]
            for i, number in moved:
                targets, key = places[i]
                targets[key] = number
            self._plain = _contents([source for source, _ in self._pairs])
        return moved is not None

    def same(self, helper: ctypes.PyDLL | None) -> bool:
        """Is all unchanged except numbers? In Python, after `look` returned None."""
        change = None if self._guard is None else self._guard.found
        if not self._follow(helper):
            return False
        if change == GRADIENTS:
            return True
        same = (
            self._held.same(helper)
            and all(map(is_, map(compat.local_part, self._seen), self._locals))
            and all(map(is_, map(compat.spec_of, self._seen), self._specs))
            and [*map(torch.Tensor.data_ptr, self._locals)] == self._at
            and [*map(_FLAG, self._whole)] == self._flags
        )
        holdings = self._held.holdings
        if change == OTHER:
            self._guard = None  # it would report a change in each call
        elif same and not self._guarded and helper is not None and holdings is not None:
            self._guarded = True
            guard = PartGuard(helper, self._seen, self._local_params, holdings)
            self._guard = guard if guard.works else None
        return same

    def begin(self, specs: Sequence[Any]) -> None:
        """Begin a step for which `look` returned None; `specs`: of its gradients."""
        self._versions = [*map(_VERSION, self._local_params)]
        if self._guard is not None:
            self._guard.expect(specs)

    def count_up(self) -> None:
        """End a step: increase the versions of the changed parameters."""
        before: Sequence[int] = self._versions
        if not before and self._guard is not None:
            if self._guard.bump():
                return
            before = self._guard.versions
        changed = map(ne, map(_VERSION, self._local_params), before)
        compat.bump_versions([*compress(self._whole, changed)])
