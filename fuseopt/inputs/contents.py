"""Record the contents of dicts and lists, and compare them with the record.

From the second comparison on, the compiled helper compares in one call.
"""

from __future__ import annotations

import collections
import ctypes
import functools
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress, count, repeat
from operator import is_, is_not
from typing import Any

from .. import compat
from ..runtime.guards.library import ContainerRecord
from ..runtime.guards.tensors import address
from .change import SAME, Change, Difference, MovedNumber

#: Types of numbers that a schedule changes. The shadow updates them in place.
MOVES = frozenset({int, float})
#: Containers that the compiled helper may iterate over.
COMPARED_IN_C = frozenset({dict, list, collections.defaultdict})
_flat = chain.from_iterable


def moves(x: Any, before: Any) -> bool:
    """Does a number replace a number, as a schedule does it?"""
    if type(x) in MOVES:
        return type(before) in MOVES
    return compat.is_numpy_float(x) and type(before) is type(x)


def containers_within(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each dict and list among some values once, and those nested within.

    Goes through dicts, lists and tuples.
    """
    seen: set[int] = set()
    waiting = [*values]
    for x in waiting:  # the loop extends the list
        if not isinstance(x, (dict, list, tuple)) or id(x) in seen:
            continue
        seen.add(id(x))
        if not isinstance(x, tuple):
            yield x
        waiting += x.values() if isinstance(x, dict) else x


def _parts(containers: Iterable[Any]) -> list[Iterable[Any]]:
    """Return the keys and the values of dicts, and lists, as live views."""
    parts: list[Iterable[Any]] = []
    for x in containers:
        parts.append(x)
        if isinstance(x, dict):
            parts.append(dict.values(x))
    return parts


class Contents:
    """A record of the contents of `containers`, dicts and lists, by identity.

    `held`: copies of the containers with the contents to compare with; by default the
    present contents. `cells`: the contents, one container after another; those of a
    dict are its keys, then its values. No comparison looks up a key, because a tensor's
    hash is a call of Python.
    """

    def __init__(
        self, containers: Sequence[Any] = (), held: Sequence[Any] | None = None
    ) -> None:
        recorded = containers if held is None else held
        self.containers = containers
        self.sizes = [*map(len, recorded)]
        self.cells = [*_flat(_parts(recorded))]
        self._now = _parts(containers)
        self._compared = False
        #: the same comparison in C, from the second comparison on
        self.in_c: Callable[[], int] | None = None
        #: the record for the compiled helper, once `fill` has written it
        self.struct: ContainerRecord | None = None
        self._arrays: list[array[int]] = []

    def same(self, helper: ctypes.PyDLL | None = None) -> bool:
        """Are the contents unchanged? `helper`: the library of the guards."""
        in_c = self.in_c or self._recorded_for(helper)
        if in_c is not None:
            return bool(in_c())
        cells = self.now()
        return cells is not None and all(map(is_, cells, self.cells))

    def compare(self, helper: ctypes.PyDLL | None = None) -> Difference:
        """SAME, STRUCTURE, or NUMBERS if only numbers replaced numbers in dicts."""
        in_c = self.in_c or self._recorded_for(helper)
        if in_c is not None and in_c():
            return SAME
        cells = self.now()
        if cells is None:
            return Difference(Change.STRUCTURE, "a dict or a list has another length")
        changed = self.changed(cells)
        if not changed:
            return SAME
        values = self._values
        for i in changed:
            if not values[i] or not moves(cells[i], self.cells[i]):
                before, after = type(self.cells[i]).__name__, type(cells[i]).__name__
                reason = f"a {after} has replaced a {before}"
                return Difference(Change.STRUCTURE, reason)
        moved = [self.moved_number(i, cells[i]) for i in changed]
        return Difference(Change.NUMBERS, moved=moved)

    def now(self) -> list[Any] | None:
        """Return the present cells; None if a container's length has changed."""
        if [*map(len, self.containers)] != self.sizes:
            return None
        return [*_flat(self._now)]

    def changed(self, cells: Sequence[Any]) -> list[int]:
        """Return the indices of the present cells that are new objects."""
        return [*compress(count(), map(is_not, cells, self.cells))]

    def moved_number(self, i: int, number: Any) -> MovedNumber:
        """Return a new number in cell i, which has the value of a dict."""
        k = bisect_right(self._starts, i) - 1
        key = self.cells[i - self.sizes[k]]
        return MovedNumber(i, self.containers[k], key, number)

    def cell_of(self, container: Any, key: Any) -> int | None:
        """Return the cell with the value of a key of a dict, found by identity."""
        k = self._numbers.get(id(container))
        if k is None:
            return None
        start, n = self._starts[k], self.sizes[k]
        found = map(is_, self.cells[start : start + n], repeat(key))
        return next(compress(count(start + n), found), None)

    def put(self, i: int, x: Any) -> None:
        """Record x as the content of cell i."""
        self.cells[i] = x
        if self._arrays:
            self._arrays[-1][i] = id(x)

    def take(self, cells: Sequence[Any], changed: Iterable[int]) -> None:
        """Record these cells; `changed`: the indices of the new ones."""
        for i in changed:
            self.put(i, cells[i])

    def fill(self, struct: ContainerRecord) -> bool:
        """Write the record to a struct for the compiled helper.

        The struct holds addresses, and this object keeps their targets alive. Returns
        False if the helper cannot compare all containers.
        """
        containers = self.containers
        if not containers or not {*map(type, containers)} <= COMPARED_IN_C:
            return False
        pairs = zip(containers, self.sizes, strict=True)
        self._arrays = [
            array("Q", map(id, containers)),
            array("q", [n if isinstance(x, dict) else -1 - n for x, n in pairs]),
            array("Q", bytes(8 * len(containers))),
            array("Q", map(id, self.cells)),
        ]
        addresses = map(address, self._arrays)
        struct.containers, struct.sizes, struct.versions, struct.items = addresses
        struct.version = compat.dict_version()
        struct.n = len(containers)
        self.struct = struct
        return True

    def _recorded_for(self, helper: ctypes.PyDLL | None) -> Callable[[], int] | None:
        """Return the comparison in C, which the second comparison makes.

        A record that changes at each call is compared only once.
        """
        if helper is None:
            return None
        before, self._compared = self._compared, True
        struct = ContainerRecord()
        if before and self.fill(struct):
            self.in_c = comparison_in_c(helper, struct)
        return self.in_c

    @functools.cached_property
    def _starts(self) -> list[int]:
        """Return the index of each container's first cell."""
        pairs = zip(self.containers, self.sizes, strict=True)
        lengths = [2 * n if isinstance(x, dict) else n for x, n in pairs]
        return [*accumulate(lengths, initial=0)][:-1]

    @functools.cached_property
    def _numbers(self) -> dict[int, int]:
        """Return each container's index, by its id."""
        return {id(x): k for k, x in enumerate(self.containers)}

    @functools.cached_property
    def _values(self) -> bytes:
        """Return a byte for each cell, 1 for the value of a dict."""
        return b"".join(
            bytes(n) + b"\1" * n if isinstance(x, dict) else bytes(n)
            for x, n in zip(self.containers, self.sizes, strict=True)
        )


def holds(record: Contents, x: Any) -> bool:
    """Do recorded containers, or tuples in them, have this very object?"""
    waiting = [*record.cells]
    for y in waiting:  # the loop extends the list
        if y is x:
            return True
        if type(y) is tuple:
            waiting += y
    return False


def comparison_in_c(helper: ctypes.PyDLL, struct: ContainerRecord) -> Callable[[], int]:
    """Return a call of C: 1 if the contents are those of the record, else 0."""
    call = helper.fuseopt_holds
    call.restype, call.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    return functools.partial(call, ctypes.addressof(struct))
