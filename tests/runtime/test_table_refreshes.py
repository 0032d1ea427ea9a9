"""What tables write before a launch: addresses of all lanes, numbers of the CPU."""

from __future__ import annotations

import ctypes
import sys
from array import array
from types import SimpleNamespace

import pytest
import torch

from fuseopt.codegen.triton.variant import ALIGNED, FLAT, RECORD
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards.library import HELPER
from fuseopt.runtime.tables.host_numbers import WORD, Cells
from fuseopt.runtime.triton.records import Block, Records
from fuseopt.runtime.triton.table import TritonTable
from tests.simulated.twins import SimTwins

CELLS = 1 << 20  # where cells lie


@pytest.fixture(scope="module")
def built() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(HELPER, None, False)._name)


@pytest.fixture(params=["in C", "in tensors"])
def helper(request, built):
    """The compiled helper, then none."""
    return built if request.param == "in C" else None


def calls(function) -> int:
    """Functions, of Python and of C, that a call runs."""
    found = 0

    def tell(frame, event, arg):
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(tell)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


# ---------------------------------------------------------------- records


def blocks(lanes: int, variants: int, random: torch.Generator) -> tuple[list, int, int]:
    """Variants with slots of elements and lanes, some in cells, some with geometry."""
    found, base, position, cell = [], 0, 0, 0
    for k in range(variants):
        slots = 2 + k % 3
        width = RECORD + slots + k % 2
        elements = torch.tensor([s != 1 for s in range(slots)])
        cells = torch.full((lanes, slots), -1)
        if k % 2:
            cells[:, 1] = torch.arange(cell, cell + lanes)
            cell += lanes
        strided = torch.where(torch.rand(lanes, generator=random) < 0.3, 7, -1)
        places = torch.randperm(lanes * slots, generator=random).view(lanes, slots)
        found.append(
            Block(
                *(base, lanes, width, position + places, elements, strided, cells),
                torch.zeros(slots, dtype=torch.bool),
            )
        )
        base += lanes * width
        position += lanes * slots
    return found, base, position


def one_by_one(found: list[Block], words: list[int], pool: array) -> list[int]:
    """The same, a lane and a slot after the other."""
    words = list(words)
    for b in found:
        for i in range(b.lanes):
            at, aligned = b.base + i * b.width, True
            for s, cell in enumerate(b.cell[i].tolist()):
                address = (
                    CELLS + WORD * cell if cell >= 0 else pool[int(b.position[i, s])]
                )
                words[at + RECORD + s] = address
                aligned &= address % 16 == 0 or not b.elements[s]
            layout = ALIGNED if aligned else FLAT
            strided = int(b.strided[i])
            words[at] = strided if strided >= 0 else layout
    return words


def test_all_variants_are_refreshed_as_each_lane_alone(helper):
    random = torch.Generator().manual_seed(1)
    found, size, n = blocks(9, 5, random)
    records = Records(found)
    records.use_helper(helper)
    lanes = torch.arange(size) * 1000
    pool = array("Q", (torch.randint(1, 1 << 40, (n,), generator=random) * 8).tolist())
    for moved in (range(n), [3], [], [n - 1, 0], range(0, n, 2)):
        for i in moved:
            pool[i] += 16 if i % 2 else 8
        before = lanes.tolist()
        want = one_by_one(found, before, pool)
        changed = [k for k in range(size) if want[k] != before[k]]
        low, high = records.refresh(lanes, pool, CELLS)
        assert lanes.tolist() == want
        assert (low, high) == ((changed[0], changed[-1] + 1) if changed else (0, 0))
    assert not changed or moved
    copied = lanes.clone()
    records.relocate(copied, 4096)
    assert (copied - lanes).unique().tolist() == [0, 4096]
    assert int((copied != lanes).sum()) == sum(int((b.cell >= 0).sum()) for b in found)


@pytest.mark.parametrize("moves", [True, False])
def test_a_refresh_is_as_many_calls_for_many_lanes_and_variants(moves, helper):
    def counted(lanes: int, variants: int) -> int:
        found, size, n = blocks(lanes, variants, torch.Generator().manual_seed(1))
        records, words = Records(found), torch.zeros(size, dtype=torch.int64)
        records.use_helper(helper)
        pool = array("Q", [16 * k for k in range(1, n + 1)])
        records.refresh(words, pool, CELLS)
        if moves:
            for i in range(n):
                pool[i] += 16
        return calls(lambda: records.refresh(words, pool, CELLS))

    assert counted(300, 20) == counted(2, 2)
    if helper is not None:
        # the refresh, where words and the pool lie, the helper, this function
        assert counted(300, 20) <= 6


# ---------------------------------------------------------------- numbers of the CPU

KINDS = {
    "f32": torch.float32, "f64": torch.float64, "i64": torch.int64,
    "bf16": torch.bfloat16, "b8": torch.bool, "i32": torch.int32,
}  # fmt: skip


class Numbers:
    """Numbers of the CPU in the cells of a kernel, and their pool."""

    def __init__(self, count: int, helper: ctypes.PyDLL | None) -> None:
        kinds = [list(KINDS)[k % len(KINDS)] for k in range(count)]
        self.tensors = [torch.ones((), dtype=KINDS[kind]) for kind in kinds]
        variant = SimpleNamespace(columns=(tuple(range(count)),))
        kernel = SimpleNamespace(every=(variant,))
        self.cells = Cells(kernel, dict(enumerate(kinds)))
        self.pool = array("Q", [t.data_ptr() for t in self.tensors])
        self.words = torch.zeros(count, dtype=torch.int64)
        place = {b: b for b in range(count)}
        self.cells.use_helper(helper)
        self.cells.settle(self.words, self.pool, place)

    def held(self) -> list[float]:
        """What lies in the cells, read by the types of the numbers."""
        return [
            float(self.words[k : k + 1].view(t.dtype)[0])
            for k, t in enumerate(self.tensors)
        ]

    def check(self) -> None:
        assert self.held() == [float(t) for t in self.tensors]


def test_numbers_of_all_types_are_fetched_when_they_change_or_move(helper):
    given = Numbers(60, helper)
    assert given.cells.fetch()
    given.check()
    assert not given.cells.fetch()
    for t in given.tensors:
        t.copy_(torch.tensor(3))
    assert given.cells.fetch()
    given.check()
    given.tensors[7].fill_(0)
    assert given.cells.fetch()
    given.check()
    # elsewhere, with the same number, and then with another
    for k in (0, 5, 11):
        given.tensors[k] = given.tensors[k].clone()
        given.pool[k] = given.tensors[k].data_ptr()
    assert not given.cells.fetch()
    given.tensors[5].fill_(9)
    assert given.cells.fetch()
    given.check()


def test_numbers_that_are_written_into_their_cells_are_not_fetched(helper):
    given = Numbers(12, helper)
    given.cells.fetch()
    homes = given.cells.give_homes([0, 6])
    given.tensors[0].fill_(5)
    given.tensors[1].fill_(6)
    homes[6][:4] = torch.tensor([2.5]).view(torch.uint8)
    assert given.cells.fetch()
    held = given.held()
    assert (held[0], held[1], held[6]) == (1, 6, 2.5)


def test_a_fetch_is_as_many_calls_for_many_numbers(helper):
    def counted(count: int) -> int:
        given = Numbers(count, helper)
        given.cells.fetch()
        given.tensors[1].fill_(7)
        return calls(given.cells.fetch)

    assert counted(1200) == counted(12)
    if helper is not None:
        # the fetch, where the pool lies, the helper
        assert counted(1200) <= 4


def test_a_step_on_a_device_asks_the_helper(sim, monkeypatch):
    """Counters of the CPU and addresses, with gradients that move, at any number of
    parameters: so many functions, of Python and of C.
    """

    def counted(count: int) -> tuple[int, int]:
        twins = SimTwins(torch.optim.AdamW, ((5,),) * count, cudagraphs=False)
        for _ in range(3):
            twins.step()
        found = {"refresh": 0, "fetch": 0}
        with monkeypatch.context() as patched:
            for name in found:
                plain = getattr(TritonTable, name)

                def counting(table, plain=plain, name=name):
                    found[name] += calls(lambda: plain(table))

                patched.setattr(TritonTable, name, counting)
            twins.step()
        assert twins.differences() == []
        return found["refresh"], found["fetch"]

    assert counted(40) == counted(4)
    assert max(counted(40)) <= 24
