"""Record the contents of dicts and lists, compare them, and follow changed numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from itertools import chain, compress, count, islice
from operator import attrgetter, is_, is_not
from typing import Any

from .. import compat
from ..runtime.guards.holdings import CONTAINERS, Holdings

#: Types of numbers that a schedule changes; they are updated in the shadow in place.
MOVES = frozenset({int, float})
_flat = chain.from_iterable


def moves(x: Any, before: Any) -> bool:
    """Is it a number in the place of one, as a schedule puts it?"""
    if type(x) in MOVES:
        return type(before) in MOVES
    return compat.is_numpy_float(x) and type(before) is type(x)


class Contents:
    """A record of the contents of dicts and lists, by identity.

    `tables`, `rows`: the dicts and lists to compare; `held`, `listed`: copies with the
    contents to compare with.
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
        #: the same record for the library of the guards, once it is used
        self.holdings: Holdings | None = None
        # no key is looked up: a tensor's hash is a call of Python
        self._cells = [*_flat(held), *_flat(map(dict.values, held)), *_flat(listed)]
        self._sizes = [*map(len, held), *map(len, listed)]
        self._keys = sum(map(len, held))  # cells before the first value

    def same(self, helper: ctypes.PyDLL | None = None) -> bool:
        """Are the contents unchanged? `helper`: the library of the guards."""
        # `self.holdings` first: it spares a call of Python
        record = self.holdings or self._told(helper)
        if record is not None:
            return record.same()
        cells = self._now()
        return cells is not None and all(map(is_, cells, self._cells))

    def _told(self, helper: ctypes.PyDLL | None) -> Holdings | None:
        """The record for the helper, made at the second comparison: a record that
        changes at each call is compared only once.
        """
        if helper is None:
            return None
        was_asked, self._asked = self._asked, True
        containers = [*self._tables, *self._rows]
        if not (was_asked and containers and {*map(type, containers)} <= CONTAINERS):
            return None
        keys, values = iter(self._cells), iter(self._cells[self._keys :])
        items: list[Any] = []
        for n in self._sizes[: len(self._tables)]:
            items += [*islice(keys, n), *islice(values, n)]
        self.holdings = Holdings(helper, containers, self._sizes, [*items, *values])
        return self.holdings

    def moved(self, helper: ctypes.PyDLL | None = None) -> list[tuple[int, Any]] | None:
        """(index among the values of all tables, new number) of each number that
        replaced a number; [] if nothing changed, None if anything else did.
        """
        record = self.holdings or self._told(helper)
        if record is not None and record.same():
            return []
        cells = self._now()
        if cells is None:
            return None
        first, after = self._keys, 2 * self._keys
        numbers = []
        for i in compress(count(), map(is_not, cells, self._cells)):
            if not first <= i < after or not moves(cells[i], self._cells[i]):
                return None
            numbers.append((i - first, cells[i]))
        return numbers

    def _now(self) -> list[Any] | None:
        """The current contents; None if a container has another size than before."""
        tables, rows = self._tables, self._rows
        if [*map(len, tables), *map(len, rows)] != self._sizes:
            return None
        return [*_flat(tables), *_flat(map(dict.values, tables)), *_flat(rows)]


class Pair:
    """An optimizer's container and the shadow's copy, with their last contents."""

    __slots__ = ("before", "ours", "seen", "theirs")

    def __init__(self, theirs: Any, seen: Any, ours: Any) -> None:
        self.theirs = theirs
        self.seen = seen
        self.ours = ours
        self.before = ours.copy()


_THEIRS, _SEEN = attrgetter("theirs"), attrgetter("seen")
_OURS, _BEFORE = attrgetter("ours"), attrgetter("before")


class Part:
    """Some of an optimizer's containers, by id, and records of their contents."""

    def __init__(self) -> None:
        self.pairs: dict[int, Pair] = {}
        self.roots: list[int] = []  # ids of the outermost, alive in `pairs`
        self.tables: list[Pair] = []
        self.rows: list[Pair] = []
        self.theirs = self.ours = Contents()
        #: (pair, key) of each value of the tables, in order; made by `follow`
        self.values: list[tuple[Pair, Any]] = []

    def note(self) -> None:
        """Record the contents of all pairs, whose sides are equal now."""
        every = self.pairs.values()
        self.values = []
        self.rows = [x for x in every if type(x.ours) is list]
        self.tables = [x for x in every if type(x.ours) is not list]
        self.note_again()

    def follow(
        self, moved: Sequence[tuple[int, Any]], ours: Callable[[Any, Any], Any] | None
    ) -> None:
        """Take over the numbers that `theirs.moved` gave.

        `ours(before, x)`: the shadow's number for x, given the one that it replaces.
        """
        if not self.values:
            self.values = [(pair, key) for pair in self.tables for key in pair.theirs]
        for i, x in moved:
            pair, key = self.values[i]
            pair.seen[key] = x
            if ours is not None:
                x = ours(pair.ours[key], x)
            pair.ours[key] = pair.before[key] = x
        self.note_again()

    def note_again(self) -> None:
        """Record the contents of the same pairs again."""
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
