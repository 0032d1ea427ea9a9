"""Pairs of an optimizer's dicts and lists and the shadow's copies of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter, is_
from typing import Any

import torch

from ..inputs.change import MovedNumber
from ..inputs.contents import Contents

TENSORS = (torch.Tensor, torch.nn.Parameter)


class Pair:
    """An optimizer's container and the shadow's copy, with their last contents."""

    __slots__ = ("before", "ours", "seen", "theirs")

    def __init__(self, theirs: Any, seen: Any, ours: Any) -> None:
        self.theirs = theirs
        self.seen = seen
        self.ours = ours
        self.before = ours.copy()

    def keeps_items(self) -> bool:
        """Has the copy the items that it had, or the keys if it is a dict?"""
        ours, before = self.ours, self.before
        return len(ours) == len(before) and all(map(is_, ours, before))

    def news(self) -> tuple[list[Any], dict[Any, Any]] | None:
        """Return the step's writes to the copy of a dict, or None.

        They are the keys to remove first, then the items to store.
        """
        ours, before = self.ours, self.before
        if self.keeps_items():
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

    `theirs`: the record of the optimizer's containers; `ours`: of the shadow's copies.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.roots: list[int] = []  # ids of the outermost; `pairs` keeps them alive
        self.tables: list[Pair] = []
        self.rows: list[Pair] = []
        self.theirs = self.ours = Contents()
        #: of numbers that have moved, by the id of their dict and key
        self._cells: dict[tuple[int, Any], tuple[Pair, int, int]] = {}

    def note(self) -> None:
        """Record the contents of all pairs, whose sides are equal now."""
        every = self.pairs.values()
        self.rows = [x for x in every if type(x.ours) is list]
        self.tables = [x for x in every if type(x.ours) is not list]
        self.note_again()

    def follow(
        self, moved: Iterable[MovedNumber], ours: Callable[[Any, Any], Any] | None
    ) -> bool:
        """Take over numbers that have moved; return False for one without a copy.

        `ours(before, x)`: returns the shadow's number for x, in place of `before`.
        """
        for _, theirs, key, x in moved:
            place = self._cells.get((id(theirs), key)) or self._place(theirs, key)
            if place is None:
                return False
            pair, i, j = place
            pair.seen[key] = x
            self.theirs.put(i, x)
            if ours is not None:
                x = ours(pair.ours[key], x)
            pair.ours[key] = pair.before[key] = x
            self.ours.put(j, x)
        return True

    def settle(self, pair: Pair, news: dict[Any, Any]) -> bool:
        """Record numbers that a step wrote to both sides of a pair.

        `news`: the values of the optimizer's dict. Returns False if it cannot.
        """
        at = id(pair.theirs)
        for key, x in news.items():
            place = self._cells.get((at, key)) or self._place(pair.theirs, key)
            if place is None or place[0] is not pair:
                return False  # all was copied anew since
            _, i, j = place
            self.theirs.put(i, x)
            pair.before[key] = number = pair.ours[key]
            self.ours.put(j, number)
        return True

    def _place(self, theirs: Any, key: Any) -> tuple[Pair, int, int] | None:
        """Return a dict's pair, and the cells of a key in both records."""
        pair = self.pairs.get(id(theirs))
        if pair is None or pair.theirs is not theirs:
            return None
        if not isinstance(pair.ours.get(key), (int, float)):
            return None  # the shadow has empty hooks there, for example
        i = self.theirs.cell_of(theirs, key)
        j = self.ours.cell_of(pair.ours, key)
        if i is None or j is None:
            return None
        place = self._cells[id(theirs), key] = pair, i, j
        return place

    def restored(self, helper: ctypes.PyDLL | None) -> bool:
        """Undo what a step stored in the copies; False if keys came or went."""
        if self.ours.same(helper):
            return True
        for pair in self.tables:
            if not pair.keeps_items():
                return False
            pair.ours.update(pair.before)
        return self.ours.same(helper)

    def note_again(self) -> None:
        """Record the contents of the same pairs again."""
        self._cells = {}
        every = [*self.tables, *self.rows]
        self.ours = Contents([*map(_OURS, every)], [*map(_BEFORE, every)])
        self.theirs = Contents([*map(_THEIRS, every)], [*map(_SEEN, every)])


def within(name: str, key: Any, value: Any) -> str:
    """Return the name of a value in a dict."""
    return f"{name} {key}" if type(key) is str and type(value) not in TENSORS else name


def _displaced(before: Mapping[Any, Any], now: Mapping[Any, Any]) -> list[Any]:
    """Return the keys to remove from a dict with the keys `before`.

    Adding the missing keys afterwards gives it the keys of `now`, in order.
    """
    common = [k for k in before if k in now]
    stay = 0
    for k, other in zip(common, now, strict=False):
        if k is not other:
            break
        stay += 1
    return [*(k for k in before if k not in now), *common[stay:]]
