"""Chains of products from C: the bits of ATen's calls, row by row."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch

from fuseopt.compiler import pipeline
from fuseopt.ir.products import CHAINED
from fuseopt.runtime import executor
from fuseopt.runtime.chained_batches import Chain, ChainedBatches
from fuseopt.runtime.chains import (
    Chains,
    _Rooms,
    batched_in_chain,
    chain_call,
    in_room,
    place_of,
    step_of,
)
from fuseopt.runtime.matrix_rows import same_bits
from fuseopt.runtime.probes import Probes
from tests.numerics.test_products import LED, WHOLE, Pair
from tests.papers.matrices import LoopMuon, Matrices, NorMuon

#: m, n, k: whole vectors, parts of them, one and several blocks of terms.
SIZES = [
    (16, 16, 16),
    (8, 32, 64),
    (64, 48, 24),
    (33, 65, 77),
    (5, 3, 40),
    (20, 40, 512),
    # the last columns are computed with those before them, or beside
    (24, 24, 16),
    (40, 90, 24),
    (50, 40, 300),
]
DTYPES = [torch.float32, torch.float64]


def matrices(n: int, rows: int, columns: int, dtype: Any, turned: bool) -> Any:
    """Normal numbers, some of them zeros of both signs; rows or columns adjacent."""
    shape = (n, columns, rows) if turned else (n, rows, columns)
    t = torch.randn(shape, dtype=dtype)
    t.view(-1)[::7] = 0.0
    t.view(-1)[::11] = -0.0
    return t.mT if turned else t


def in_order(left: Any, right: Any, terms: int) -> Any:
    """Sum in the order of k, in blocks of `terms`, as a chain does.

    For float32 only: a product of two is exact in float64, and so is nearly each sum.
    """
    total = None
    parts = left.split(terms, -1), right.split(terms, -2)
    for part, other in zip(*parts, strict=True):
        s = torch.zeros(left.shape[0], left.shape[1], right.shape[2])
        for k in range(part.shape[-1]):
            exact = part[..., k, None].double() * other[..., k, None, :].double()
            s = (exact + s.double()).float()
        total = s if total is None else total + s
    return total


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("terms", [256, 192, 0])
def test_products_in_all_layouts(
    library: Chains, dtype: Any, size: Any, terms: int
) -> None:
    """A result does not depend on layouts; that of ATen is near."""
    torch.manual_seed(0)
    m, n, k = size
    order = str(terms) if terms else ""
    first = None
    for turns in itertools.product((False, True), repeat=3):
        torch.manual_seed(1)
        left = torch.randn(3, m, k, dtype=dtype)
        right = torch.randn(3, k, n, dtype=dtype)
        out = matrices(3, m, n, dtype, turns[2])
        left = left.mT.contiguous().mT if turns[0] else left
        right = right.mT.contiguous().mT if turns[1] else right
        batched_in_chain(library, [left, right], out, (), order=order)
        first = out.clone() if first is None else first
        assert same_bits(first, out), turns
    assert first is not None
    torch.testing.assert_close(first, left @ right, rtol=1e-3, atol=1e-4)
    assert dtype != torch.float32 or same_bits(first, in_order(left, right, terms or k))


@pytest.mark.parametrize("turned", [False, True])
def test_symmetric_products(library: Chains, turned: bool) -> None:
    """Half of X X^T is copied; it has the bits of the other half."""
    for m in (16, 40, 64, 100):
        x = matrices(2, m, 33, torch.float32, turned)
        out, other = torch.empty(2, m, m), torch.empty(2, m, m)
        batched_in_chain(library, [x, x.mT], out, ())
        batched_in_chain(library, [x, x.clone().mT], other, ())
        assert same_bits(out, other)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("turned", [False, True])
def test_sums_around_a_product(library: Chains, turned: bool, size: Any) -> None:
    m, n, k = size
    add = matrices(3, m, n, torch.float32, turned)
    left = matrices(3, m, k, torch.float32, not turned)
    right = matrices(3, k, n, torch.float32, turned)
    for alpha in (1.0, 2.0315):
        out, product = matrices(3, m, n, torch.float32, turned), torch.empty(3, m, n)
        batched_in_chain(library, [add, left, right], out, (3.4445, alpha))
        batched_in_chain(library, [left * alpha, right], product, ())
        assert same_bits(out, add * 3.4445 + product)
        # one rounding less is another result
        assert not same_bits(
            out, torch.addcmul(product, add, torch.tensor(3.4445))
        ) or (m * n < 20)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_in_turn(library: Chains, threads: int) -> None:
    """A row of a chain reads what the same row made, in the room of its thread."""
    x = torch.randn(7, 24, 24)
    out = torch.empty(7, 24, 24)
    inner = in_room(0, (24, 1))
    steps = [
        step_of((24, 24, 24), [place_of(x), place_of(x.mT)], inner, ()),
        step_of((24, 24, 24), [inner, place_of(x)], place_of(out), ()),
    ]
    call = chain_call(library, 7, 4, steps, 24 * 24 * 4)
    call(threads)()
    gram, wanted = torch.empty_like(x), torch.empty_like(x)
    batched_in_chain(library, [x, x.mT], gram, ())
    batched_in_chain(library, [gram, x], wanted, ())
    assert same_bits(out, wanted)


def test_a_call_of_c_keeps_the_rooms_of_its_threads(
    library: Chains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may hold the call when its chain has another one."""
    made: list[weakref.ref[Any]] = []
    of = _Rooms.of

    def seen(self: _Rooms, size: int) -> int:
        made.append(weakref.ref(self))
        return of(self, size)

    monkeypatch.setattr(_Rooms, "of", seen)
    x, out = torch.randn(2, 24, 24), torch.empty(2, 24, 24)
    step = step_of((24, 24, 24), [place_of(x), place_of(x.mT)], place_of(out), ())
    call = chain_call(library, 2, 4, [step], 0)(1)
    gc.collect()
    (room,) = made
    assert room() is not None
    call()
    del call
    gc.collect()
    assert room() is None


# ---------------------------------------------------------------- steps


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of batches of each chain that runs."""
    found: list[int] = []
    call = Chain.call

    def counted(self: Chain, memory: Any) -> Any:
        found.append(len(self.batches))
        return call(self, memory)

    monkeypatch.setattr(Chain, "call", counted)
    return found


def chained(pair: Pair) -> bool:
    return {b.way for b in pair.report.batches} == {CHAINED}


@pytest.mark.usefixtures("bits")
@pytest.mark.parametrize("shapes", [LED, WHOLE], ids=["led", "whole"])
def test_a_chain_for_each_shape(runs: list[int], shapes: Any) -> None:
    """Fifteen products of a shape are one call, with what stands around them."""
    pair = Pair(LoopMuon, shapes)
    pair.run(3)
    assert chained(pair)
    assert pair.report.externs == pair.report.alone == []
    assert runs[-3:] == [15, 15, 15]
    runs.clear()
    pair.run(1)
    # C makes the calls of the last step again
    assert runs == []
    # nor are there calls of ATen where a profiler sees each batch
    assert pair.calls() == 0
    pair.check()
    # momentum, norm and quotient before the products, the update after them
    assert pair.report.launches <= 5


@pytest.mark.usefixtures("bits")
def test_where_a_chain_may_not_run_its_batches_do(
    runs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other circumstances, without the bits: the single calls of eager."""
    pair = Pair(LoopMuon, WHOLE)
    pair.run(2)
    before = torch.get_num_threads()
    monkeypatch.setattr(Probes, "_answer", lambda *_: "")
    torch.set_num_threads(before + 1)
    try:
        pair.run(2)
        # a scaled sum is a product and two passes
        assert pair.calls() == 6 * 15
        pair.check()
    finally:
        torch.set_num_threads(before)
    monkeypatch.undo()
    pair.run(2)


@pytest.mark.usefixtures("bits")
def test_an_error_in_a_chain_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(LoopMuon, WHOLE)
    pair.run(2)
    run, call, done = ChainedBatches.run, Chain.call, []

    def breaks(self: ChainedBatches, memory: Any) -> int:
        done.append(run(self, memory))
        raise MemoryError("no room")

    def has_no_room(self: Chain, memory: Any) -> Any:
        done.append(len(self.batches))
        if len(done) == 3:
            raise MemoryError("no room")
        return call(self, memory)

    # the calls of the last step do not serve for this one
    known = executor.circumstances()._replace(settings=("others",))
    monkeypatch.setattr(executor, "circumstances", lambda: known)
    for owner, name, instead in (
        (Chain, "call", has_no_room),
        # where Python runs between the calls of C, what is written is undone
        (ChainedBatches, "run", breaks),
    ):
        monkeypatch.setattr(owner, name, instead)
        if owner is ChainedBatches:
            monkeypatch.setattr(executor, "_in_c", lambda *_: None)
        pair.gradients()
        with pytest.raises(MemoryError, match="no room"):
            pair.compiled.step()
        assert done
        pair.check()
        monkeypatch.undo()
        pair.step()
        pair.check()


class Turned(Matrices):
    """Sums around products in the orders in which a step may write them.

    Some are no scaled sum: a product that is read twice, one that is added in place, a
    scale that broadcasts, a sum with a scaled product.
    """

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        lr = group["lr"]
        gram = g @ g.mT
        one = gram @ gram + 0.5 * gram
        two = (gram * 0.25) @ one + one * lr
        three = 3.0 * one + two @ two
        twice = one @ two
        four = twice + 2.0 * one + twice
        five = (one @ three) * 0.5 + three
        row = 2.0 * one[:1] + one @ one
        six = (two @ three).add_(0.125 * four)
        seven = -1.0 * six + (five * -1.0) @ row
        p.sub_((seven @ g + 0.0 * g) / (seven.norm() + 1.0), alpha=lr)


@pytest.mark.usefixtures("bits")
@pytest.mark.parametrize("shapes", [LED, WHOLE], ids=["led", "whole"])
def test_sums_in_other_orders(shapes: Any) -> None:
    pair = Pair(Turned, shapes)
    pair.run(5)
    assert "scaled_sum" in {b.op for b in pair.report.batches}


@pytest.mark.usefixtures("bits")
def test_a_scale_that_the_group_moves() -> None:
    pair = Pair(Turned, WHOLE)
    for lr in (0.02, 0.0, 1.0, -1.0, 0.5):
        for optimizer in (pair.plain, pair.compiled):
            optimizer.param_groups[0]["lr"] = lr
        pair.run(2)


@pytest.mark.usefixtures("bits")
def test_numbers_that_are_none_in_chains() -> None:
    pair = Pair(NorMuon, WHOLE)
    pair.run(1)
    assert chained(pair)
    for number in (0.0, -0.0, 1e-42, 3e38, float("inf"), float("nan")):
        pair.gradients()
        for params in (pair.params, pair.others):
            params[0].grad.fill_(number)  # type: ignore[union-attr]
            params[3].grad[0, 1] = number  # type: ignore[index]
        pair.step()
        pair.check()


@pytest.mark.usefixtures("bits")
def test_missing_gradients_within_a_chain() -> None:
    pair = Pair(LoopMuon, LED)
    pair.run(2)
    assert chained(pair)
    for missing in ((0,), (3, 7), tuple(range(6)), tuple(range(1, 6)), (0,)):
        pair.gradients()
        for i in missing:
            pair.params[i].grad = pair.others[i].grad = None
        pair.step()
        pair.check()


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_chains", lambda *_: None)
    pair = Pair(LoopMuon, WHOLE)
    pair.run(2)
    assert {b.way for b in pair.report.batches} <= {"dense", "padded"}
    assert "scaled_sum" not in {b.op for b in pair.report.batches}
