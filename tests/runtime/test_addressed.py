"""Chains of the caller's matrices, sums of BLAS in chains, and constant calls."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fuseopt.ir.products import CHAINED
from fuseopt.runtime import constants, executor
from fuseopt.runtime.binding import Binding
from fuseopt.runtime.chains import TIMES_RIGHT, Chains, batched_in_chain
from fuseopt.runtime.matrix_rows import same_bits
from tests.numerics.test_products import LED, WHOLE, Pair
from tests.papers.matrices import Matrices, Shampoo, Soap
from tests.runtime.conftest import check_bits

ALONE = [(32, 48)]
SHAPES = pytest.mark.parametrize(
    "shapes", [LED, WHOLE, ALONE], ids=["led", "whole", "alone"]
)


@pytest.fixture
def in_c(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step, whether calls of C alone made it."""
    found: list[bool] = []
    made = executor._in_c

    def seen(*arguments: Any) -> Any:
        calls = made(*arguments)
        found.append(calls is not None)
        return calls

    monkeypatch.setattr(executor, "_in_c", seen)
    return found


@pytest.mark.usefixtures("bits")
@SHAPES
@pytest.mark.parametrize("make", [Soap, Shampoo])
def test_matrices_of_the_caller_are_not_copied(
    in_c: list[bool], make: Any, shapes: Any
) -> None:
    """Steps that read state and gradients: C alone, from one matrix on."""
    pair = Pair(make, shapes)
    pair.run(6)
    assert {b.way for b in pair.report.batches} == {CHAINED}
    assert pair.report.alone == []
    assert {b.copied for b in pair.report.batches} == {0}
    in_c.clear()
    pair.run(1)
    assert in_c == [True]
    assert pair.calls() == 0
    pair.check()


@pytest.mark.usefixtures("bits")
@pytest.mark.parametrize("shapes", [LED, ALONE], ids=["led", "alone"])
def test_gradients_in_other_places_and_layouts(shapes: Any) -> None:
    pair = Pair(Soap, shapes)
    pair.run(3)
    kept = []
    for turn in range(4):
        pair.gradients()
        for k, (p, q) in enumerate(zip(pair.params, pair.others, strict=True)):
            g = q.grad
            assert g is not None
            if turn == 1:
                g = begins_at(g, 1)
            elif turn == 2 and k == 0:
                g = g.mT.contiguous().mT
            kept.append(g)
            q.grad = p.grad = g
        pair.step()
        pair.check()


class InPlace(Matrices):
    """A sum in place, and a product, both of matrices of the caller."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["sum"] = torch.zeros(g.size(0), g.size(0), dtype=g.dtype)
        state["sum"].addmm_(g, g.mT, beta=0.7, alpha=0.3)
        p.addmm_(state["sum"], g, alpha=-1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
def test_matrices_that_begin_at_any_element(rows: int, dtype: Any) -> None:
    """BLAS adds up some products in other orders there: small ones on AMD's."""
    shapes = [(4, 64), (6, 31), (7, 232), (24, 40)]
    pair = Pair(InPlace, shapes * rows, dtype)
    pair.run(1)
    for turn in range(1, 9):
        pair.gradients()
        for side, optimizer in (
            (pair.params, pair.plain),
            (pair.others, pair.compiled),
        ):
            for k, p in enumerate(side):
                state, of = optimizer.state[p], (turn, 3 * turn + k, 5 * turn)
                p.data = begins_at(p.data, of[0] % 4)
                p.grad = begins_at(p.grad, of[1] % 4)
                state["sum"] = begins_at(state["sum"], of[2] % 4)
        pair.step()
        pair.check()


def begins_at(t: torch.Tensor | None, first: int) -> torch.Tensor:
    """Return a copy that begins so many elements behind where allocators begin."""
    assert t is not None
    place = torch.empty(t.numel() + first, dtype=t.dtype)[first:]
    return place.view(t.shape).copy_(t)


class Scaled(Matrices):
    """One product in place of the parameter, with the scales of the group."""

    def __init__(self, params: Any, dtype: Any = None) -> None:
        super().__init__(params, lr=0.5, momentum=0.7)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        x = g * 0.5
        p.copy_(torch.addmm(x, x, x, beta=group["momentum"], alpha=group["lr"]))


class Added(Matrices):
    """Products that are added to state in place, with scales that the group moves."""

    def __init__(self, params: Any, dtype: Any = None) -> None:
        super().__init__(params, lr=1e-2, decay=0.7)

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        if not state:
            state["one"] = torch.zeros(g.size(0), g.size(0), dtype=g.dtype)
            state["two"] = torch.ones(g.size(0), g.size(0), dtype=g.dtype)
        state["one"].addmm_(g, g.mT, beta=group["decay"], alpha=1 - group["decay"])
        state["two"].addmm_(state["one"], state["one"], alpha=-0.125)
        # not contiguous: the call stays as it is
        state["two"].mT.addmm_(g, g.mT, beta=0.5, alpha=1e-3)
        two = state["two"].addmm(state["one"], state["one"])
        state["two"].div_(two.norm() + 1)
        p.sub_(state["two"] @ g, alpha=group["lr"])


@pytest.mark.usefixtures("bits")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@SHAPES
def test_sums_of_products_in_place(shapes: Any, dtype: Any, library: Chains) -> None:
    check_bits(library, dtype)
    pair = Pair(Added, shapes, dtype)
    for decay in (0.7, 0.3, 1.0, 0.0):
        for optimizer in (pair.plain, pair.compiled):
            optimizer.param_groups[0]["decay"] = decay
        pair.run(3)
    ways = {b.op: b.way for b in pair.report.batches}
    assert ways["addmm"] == CHAINED


@pytest.mark.usefixtures("bits")
@pytest.mark.parametrize("rate", [1e-60, 1e-40, 1 + 1e-12])
@pytest.mark.parametrize("flush", [False, True])
def test_a_scale_that_blas_rounds(rate: float, flush: bool) -> None:
    """BLAS does not read the matrices of a product with zero, infinities or not."""
    pair = Pair(Scaled, [(16, 16)] * 2)
    pair.run(2)
    torch.set_flush_denormal(flush)
    try:
        for option in ("lr", "momentum"):
            for optimizer in (pair.plain, pair.compiled):
                optimizer.param_groups[0].update({"lr": 0.5, "momentum": 0.7})
                optimizer.param_groups[0][option] = rate
            pair.gradients()
            for p, q in zip(pair.params, pair.others, strict=True):
                assert p.grad is not None
                assert q.grad is not None
                p.grad[3, 4] = q.grad[3, 4] = float("inf")
            pair.step()
            pair.check()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(24, 40, 16), (33, 65, 77), (20, 40, 512)])
def test_the_sums_of_blas(library: Chains, dtype: Any, size: Any) -> None:
    """The first block of terms is added by one rounding, later ones by another."""
    torch.manual_seed(0)
    scaled = functools.partial(batched_in_chain, library, op="addmm", order="256")
    m, n, k = size
    left, right = (torch.randn(3, *s, dtype=dtype) for s in ((m, k), (k, n)))
    add, out = (torch.randn(3, m, n, dtype=dtype) for _ in range(2))
    for beta, alpha in ((0.7, -1.3), (1.0, 1.0), (1.0, 0.3), (0.0, 0.5)):
        scaled([add, left, right], out, (beta, alpha))
        total = None
        for a, b in zip(left.split(256, -1), right.split(256, -2), strict=True):
            s = torch.empty_like(out)
            batched_in_chain(library, [a, b], s, ())
            s = s * alpha
            if total is not None:
                total = total + s
            elif dtype == torch.float32:
                # a product of two is exact in float64, and so is nearly each sum
                number = torch.tensor(beta, dtype=dtype).double()
                total = (number * add.double() + s.double()).float()
            else:
                total = torch.addcmul(s, add, torch.full_like(add, beta))
        assert total is not None
        if dtype == torch.float32:
            differ = (total != out).sum()
            assert differ <= total.numel() // 1000
        else:
            torch.testing.assert_close(out, total, rtol=1e-12, atol=1e-12)
        if beta == 0.0:
            add.fill_(float("nan"))
            other = torch.empty_like(out)
            scaled([add, left, right], other, (0.0, alpha))
            assert all(same_bits(x, y) for x, y in zip(out, other, strict=True))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("size", [(24, 40, 16), (33, 65, 77), (20, 40, 512)])
def test_sums_of_a_scaled_right_matrix(
    library: Chains, size: Any, turned: bool
) -> None:
    """MKL's kernels for AMD scale the right matrix, and what is added first."""
    torch.manual_seed(0)
    m, n, k = size
    left, right, add = (torch.randn(3, *s) for s in ((m, k), (k, n), (m, n)))
    out = torch.empty(3, n, m).mT if turned else torch.empty(3, m, n)
    for beta, alpha in ((0.7, -1.3), (1.0, 1.0), (1.0, 0.3), (0.0, 0.5)):
        operands, order = [add, left, right], f"192{TIMES_RIGHT}"
        batched_in_chain(library, operands, out, (beta, alpha), "addmm", order)
        total = add * beta if beta else torch.zeros_like(add)
        parts = left.split(192, -1), (right * alpha).split(192, -2)
        for a, b in zip(*parts, strict=True):
            s = torch.empty(3, m, n)
            batched_in_chain(library, [a, b], s, ())
            total = total + s
        assert same_bits(out, total)
        if beta == 0.0:
            add.fill_(float("nan"))
            batched_in_chain(library, operands, out, (beta, alpha), "addmm", order)
            assert same_bits(out, total)


class Constants(Matrices):
    """Factories of numbers, some of which the step writes or keeps."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        n = g.size(0)
        one = torch.eye(n, dtype=g.dtype)
        written = torch.eye(n, dtype=g.dtype)
        written.mul_(0.5).add_(g @ g.mT)
        state["kept"] = torch.eye(n, dtype=g.dtype)
        steps = torch.arange(n, dtype=g.dtype).view(n, 1)
        p.sub_((one + written) @ g + steps * 1e-3, alpha=group["lr"])


@SHAPES
def test_constant_calls_are_made_once(
    monkeypatch: pytest.MonkeyPatch, shapes: Any
) -> None:
    bound = []
    init = Binding.__init__

    def seen(self: Binding, *arguments: Any) -> None:
        init(self, *arguments)
        bound.append(self)

    monkeypatch.setattr(Binding, "__init__", seen)
    pair = Pair(Constants, shapes)
    pair.run(4)
    plan = bound[-1].plan
    names = [plan.externs[payload].name for payload in plan.constants]
    # nothing is written where a kernel reads one and writes the sum elsewhere
    assert 2 * len(shapes) <= len(names) <= 3 * len(shapes)
    assert sum("arange" in name for name in names) == len(shapes)
    # others belong to the caller, who may write them
    kept = {id(pair.compiled.state[p]["kept"]) for p in pair.others}
    assert len(kept) == len(shapes)
    pair.compiled.state[pair.others[0]]["kept"].fill_(3.0)
    pair.plain.state[pair.params[0]]["kept"].fill_(3.0)
    pair.run(2)
    homes = bound[-1].memory.homes
    assert {*plan.constants.values()} <= homes.keys()


def test_memory_of_constants_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "KEPT", 32 * 32 * 4)
    pair = Pair(Constants, WHOLE)
    pair.run(3)
