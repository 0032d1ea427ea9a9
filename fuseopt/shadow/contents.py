"""What dicts and lists held: noted, compared, and followed where numbers have moved."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain, compress, count, islice
from operator import attrgetter, is_, is_not
from typing import Any

from ..runtime.guards.holdings import CONTAINERS, Holdings

#: Numbers that a schedule moves: what is one of these stays one in the shadow.
MOVES = frozenset({int, float})
_flat = chain.from_iterable


class Contents:
    """What dicts and lists held when this was made, by identity.

    `tables` and `rows` are asked, `held` and `listed` is what they held.
    """

    def __init__(
        self,
        tables: Sequence[Any] = (),
        rows: Sequence[Any] = (),
        held: Sequence[Any] = (),
        listed: Sequence[Any] = (),
    ) -> None:
        self._tables = tables
        self._rows = rows
        self._asked = False
        #: the same, for the library, once it is asked
        self.holdings: Holdings | None = None
        # no key is looked up: a tensor's hash is a call of Python
        self._cells = [*_flat(held), *_flat(map(dict.values, held)), *_flat(listed)]
        self._sizes = [*map(len, held), *map(len, listed)]
        self._keys = sum(map(len, held))  # cells before the first value

    def same(self, helper: ctypes.PyDLL | None = None) -> bool:
        """Do they hold the same objects still? `helper`: the library of the guards."""
        # what is asked at each call is a call of Python less
        told = self.holdings or self._told(helper)
        if told is not None:
            return told.same()
        cells = self._now()
        return cells is not None and all(map(is_, cells, self._cells))

    def _told(self, helper: ctypes.PyDLL | None) -> Holdings | None:
        """What the helper knows. It gets to know at the second time of asking: what
        moves at each call is asked about once.
        """
        if helper is None:
            return None
        asked, self._asked = self._asked, True
        containers = [*self._tables, *self._rows]
        if not (asked and containers and {*map(type, containers)} <= CONTAINERS):
            return None
        keys, values = iter(self._cells), iter(self._cells[self._keys :])
        items: list[Any] = []
        for n in self._sizes[: len(self._tables)]:
            items += [*islice(keys, n), *islice(values, n)]
        self.holdings = Holdings(helper, containers, self._sizes, [*items, *values])
        return self.holdings

    def moved(self, helper: ctypes.PyDLL | None = None) -> list[tuple[int, Any]] | None:
        """Numbers that have taken the place of numbers in the tables, with the place of
        each among the values of all; [] where all is the same, None if anything else
        is another.
        """
        told = self.holdings or self._told(helper)
        if told is not None and told.same():
            return []
        cells = self._now()
        if cells is None:
            return None
        first, after = self._keys, 2 * self._keys
        found = []
        for i in compress(count(), map(is_not, cells, self._cells)):
            if not first <= i < after or {type(cells[i]), type(self._cells[i])} - MOVES:
                return None
            found.append((i - first, cells[i]))
        return found

    def _now(self) -> list[Any] | None:
        """What they hold; None if one holds more or less than before."""
        tables, rows = self._tables, self._rows
        if [*map(len, tables), *map(len, rows)] != self._sizes:
            return None
        return [*_flat(tables), *_flat(map(dict.values, tables)), *_flat(rows)]


class Pair:
    """A container of the optimizer's and the shadow's copy, and what they last held."""

    __slots__ = ("before", "ours", "seen", "theirs")

    def __init__(self, theirs: Any, seen: Any, ours: Any) -> None:
        self.theirs = theirs
        self.seen = seen
        self.ours = ours
        self.before = ours.copy()


_THEIRS, _SEEN = attrgetter("theirs"), attrgetter("seen")
_OURS, _BEFORE = attrgetter("ours"), attrgetter("before")


class Part:
    """Some of an optimizer's containers, by id, and what they held."""

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.roots: list[int] = []  # whose pairs keep them
        self.tables: list[Pair] = []
        self.rows: list[Pair] = []
        self.theirs = self.ours = Contents()
        #: each value of the tables, in order; made when it is asked for
        self.values: list[tuple[Pair, Any]] = []

    def note(self) -> None:
        """Both sides are alike now, as their pairs say."""
        every = self.pairs.values()
        self.values = []
        self.rows = [x for x in every if type(x.ours) is list]
        self.tables = [x for x in every if type(x.ours) is not list]
        self.note_again()

    def follow(self, moved: Sequence[tuple[int, Any]]) -> None:
        """Take over the numbers that `theirs.moved` gave."""
        if not self.values:
            self.values = [(pair, key) for pair in self.tables for key in pair.theirs]
        for i, x in moved:
            pair, key = self.values[i]
            pair.seen[key] = pair.ours[key] = pair.before[key] = x
        self.note_again()

    def note_again(self) -> None:
        """The same, where the containers are those of the last time."""
        tables, rows = self.tables, self.rows
        self.ours = Contents(
            [*map(_OURS, tables)],
            [*map(_OURS, rows)],
            [*map(_BEFORE, tables)],
            [*map(_BEFORE, rows)],
        )
        self.theirs = Contents(
            [*map(_THEIRS, tables)],
            [*map(_THEIRS, rows)],
            [*map(_SEEN, tables)],
            [*map(_SEEN, rows)],
        )
