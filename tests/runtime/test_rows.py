"""Rows of a table that take part: what the helper writes is what Python writes."""

from __future__ import annotations

import ctypes
import random
from array import array
from itertools import accumulate

import pytest

from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards.library import HELPER
from fuseopt.runtime.tables.rows import Rows


@pytest.fixture(scope="module")
def helper() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(HELPER, None, False)._name)


class Table:
    """The arrays of a table of n lanes with random contents."""

    def __init__(self, n: int, slots: int, helper: ctypes.PyDLL | None) -> None:
        rng = random.Random(n)
        self.counts = [rng.randrange(9) for _ in range(n)]
        self.position = array("i", [rng.randrange(99) for _ in range(n * slots)])
        self.row = array("i", [rng.randrange(5) for _ in range(n)])
        self.start = array("q", accumulate(self.counts, initial=0))
        self.strided = array("q", [rng.randrange(-1, 7) for _ in range(n)])
        self.lanes = ctypes.c_int64(n)
        self.owners = [rng.randrange(n) for _ in range(n)]
        self.rows = Rows(
            self.owners,
            *(self.position, self.row, self.start, self.strided),
            ctypes.addressof(self.lanes),
            helper,
        )

    def read(self, slots: int) -> list[object]:
        """What a launch reads."""
        n = self.lanes.value
        return [
            self.position[: n * slots].tolist(),
            self.row[:n].tolist(),
            self.start[: n + 1].tolist(),
            self.strided[:n].tolist(),
        ]


@pytest.mark.parametrize("in_c", [True, False], ids=["in C", "in Python"])
@pytest.mark.parametrize(("n", "slots"), [(0, 3), (1, 1), (7, 4), (40, 2)])
def test_rows_of_some_owners(
    n: int, slots: int, in_c: bool, helper: ctypes.PyDLL
) -> None:
    table = Table(n, slots, helper if in_c else None)
    every = table.read(slots)
    positions = [every[0][i * slots : (i + 1) * slots] for i in range(n)]  # type: ignore[index]
    rng = random.Random(1)
    for turn in range(20):
        taking = bytes(rng.randrange(2) for _ in range(n + 1))
        table.rows.keep(taking)
        chosen = [i for i in range(n) if taking[table.owners[i]]]
        assert table.read(slots) == [
            [x for i in chosen for x in positions[i]],
            [every[1][i] for i in chosen],  # type: ignore[index]
            [*accumulate([table.counts[i] for i in chosen], initial=0)],
            [every[3][i] for i in chosen],  # type: ignore[index]
        ]
        if turn % 4 == 3:
            table.rows.keep(None)
            assert table.read(slots) == every
