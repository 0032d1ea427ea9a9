"""Pairs of an optimizer's dicts and lists and the shadow's copies of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any

from ..inputs.contents import Contents


class Pair:
    """An optimizer's container and the shadow's copy, with their last contents."""

    __slots__ = ("before", "ours", "seen", "theirs")

    def __init__(self, theirs: Any, seen: Any, ours: Any) -> None:
        self.theirs = theirs
        self.seen = seen
        self.ours = ours
        self.before = ours.copy()

    def news(self) -> tuple[list[Any], dict[Any, Any]] | None:
        """What the step wrote to the copy of a dict: the keys to remove first, and the
        items to store then; None if it wrote nothing.
        """
        ours, before = self.ours, self.before
        alike = len(ours) == len(before) and all(map(is_, ours, before))
        if alike:
            if all(map(is_, ours.values(), before.values())):
                return None
            both = zip(ours.items(), before.values(), strict=True)
            return [], {k: x for (k, x), y in both if x is not y}
        displaced = _displaced(before, ours)
        again = dict.fromkeys(displaced)
        return displaced, {
            k: x for k, x in ours.items() if k in again or before.get(k, self) is not x
        }


_THEIRS, _SEEN = attrgetter("theirs"), attrgetter("seen")
_OURS, _BEFORE = attrgetter("ours"), attrgetter("before")


class Part:
    """Some of an optimizer's containers, by id, and records of their contents.

    `theirs`, `ours`: of the optimizer's containers, and of the shadow's copies.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.roots: list[int] = []  # ids of the outermost, alive in `pairs`
        self.tables: list[Pair] = []
        self.rows: list[Pair] = []
        self.theirs = self.ours = Contents()

    def note(self) -> None:
        """Record the contents of all pairs, whose sides are equal now."""
        every = self.pairs.values()
        self.rows = [x for x in every if type(x.ours) is list]
        self.tables = [x for x in every if type(x.ours) is not list]
        self.note_again()

    def follow(
        self, moved: Sequence[tuple[int, Any]], ours: Callable[[Any, Any], Any] | None
    ) -> None:
        """Take over the numbers that `theirs.compare` found.

        `ours(before, x)`: the shadow's number for x, given the one that it replaces.
        """
        for i, x in moved:
            k, key = self.theirs.entry(i)
            pair = self.tables[k]  # lists come after them, and have no numbers
            pair.seen[key] = x
            if ours is not None:
                x = ours(pair.ours[key], x)
            pair.ours[key] = pair.before[key] = x
        self.note_again()

    def restored(self, helper: ctypes.PyDLL | None) -> bool:
        """Take back what a step stored in the copies; False if keys came or went."""
        if self.ours.same(helper):
            return True
        for pair in self.tables:
            ours, before = pair.ours, pair.before
            if len(ours) != len(before) or not all(map(is_, ours, before)):
                return False
            ours.update(before)
        return self.ours.same(helper)

    def note_again(self) -> None:
        """Record the contents of the same pairs again."""
        every = [*self.tables, *self.rows]
        self.ours = Contents([*map(_OURS, every)], [*map(_BEFORE, every)])
        self.theirs = Contents([*map(_THEIRS, every)], [*map(_SEEN, every)])


def _displaced(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """The keys to remove from a dict with the keys `before`, so that adding the missing
    ones gives it the keys of `now`, in order.
    """
    common = [k for k in before if k in now]
    stay = 0
    for k, other in zip(common, now, strict=False):
        if k is not other:
            break
        stay += 1
    return [*(k for k in before if k not in now), *common[stay:]]
