"""Iterations on Gram matrices: what is recognised, what is left, and the results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.numerics.test_products import Pair, Shapes
from tests.papers.matrices import A, B, C, LoopMuon, Matrices

WIDE: Shapes = [(12, 40)] * 2 + [(30, 12)] * 2 + [(16, 16)] * 2
#: Products of five iterations: X X^T, five of G G, two of G and one of D for four, D X.
PRODUCTS = 1 + 5 + 3 * 4 + 1


class _Iterated(Matrices):
    """Steps along what `iterated` makes of a gradient."""

    def __init__(self, params: Any, dtype: Any = None) -> None:
        super().__init__(params)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        tall = g.size(0) > g.size(1)
        x = g / (g.norm() + 1e-7)
        x = self.iterated(x.mT if tall else x, state, group)
        p.sub_(x.mT if tall else x, alpha=group["lr"])

    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        raise NotImplementedError


class Added(_Iterated):
    """As torch's Muon: products that add."""

    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        for _ in range(5):
            gram = x @ x.mT
            update = torch.addmm(gram, gram, gram, beta=B, alpha=C)
            x = torch.addmm(x, update, x, beta=A)
        return x


class Scaled(_Iterated):
    """The product has a number too, and the sum is a difference."""

    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        for _ in range(3):
            x = 1.5 * x - 0.5 * (x @ x.mT @ x)
        return x


class Other(_Iterated):
    """A matrix that neither is symmetric nor commutes with the Gram matrix."""

    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        for _ in range(4):
            gram = x @ x.mT
            update = torch.triu(gram) * 0.5 + gram.cumsum(0) * 0.1
            x = torch.addmm(x, update, x, beta=1.1, alpha=0.3)
        return x


class Kept(_Iterated):
    """The state keeps what the third iteration reads."""

    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        if not state:
            state["seen"] = torch.zeros_like(x)
        for turn in range(4):
            gram = x @ x.mT
            x = A * x + (B * gram + C * gram @ gram) @ x
            if turn == 1:
                state["seen"].copy_(x)
        return x


class Rated(_Iterated):
    """The factor is a number of the group, which may change."""

    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        for _ in range(3):
            x = torch.addmm(x, x @ x.mT, x, beta=group["lr"])
        return x


class Once(_Iterated):
    def iterated(self, x: Tensor, state: Any, group: Any) -> Tensor:
        return A * x + (x @ x.mT) @ x


def near(pair: Pair, rtol: float = 1e-10) -> None:
    for _ in range(3):
        pair.gradients()
        pair.step()
    for p, q in zip(pair.params, pair.others, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)
        one, other = pair.plain.state[p], pair.compiled.state[q]
        for key, t in one.items():
            torch.testing.assert_close(t, other[key], rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("make", "steps", "dtype"),
    [
        (LoopMuon, 5, torch.float64),
        (LoopMuon, 5, torch.float32),
        (Added, 5, torch.float64),
        (Scaled, 3, torch.float64),
        (Other, 4, torch.float64),
    ],
)
def test_wide_matrices_are_iterated_on_their_gram_matrix(
    make: Any, steps: int, dtype: torch.dtype
) -> None:
    pair = Pair(make, WIDE, dtype, numerics="fast")
    near(pair, 1e-10 if dtype == torch.float64 else 1e-4)
    assert pair.report.algorithms == [
        f"Gram form: 2 of [12, {n}], {steps} iterations" for n in (40, 30)
    ]
    assert str(pair.report.algorithms[0]) in str(pair.report).replace("\n", " ")


def test_products_are_counted() -> None:
    """More products, and fewer multiplications: of m x n there are two."""
    pair = Pair(LoopMuon, [(12, 40)] * 4, torch.float32, numerics="fast")
    near(pair, 1e-4)
    found = pair.report.batches
    assert sum(b.calls for b in found) == PRODUCTS
    # C makes the others
    assert pair.calls() == sum(b.calls for b in found if b.way != "chained")
    assert sum(b.calls for b in found if "40" in b.matrices) == 2
    assert pair.report.alone == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["led", "missing"])
def test_lanes_and_gradients_that_are_missing(way: str) -> None:
    shapes = [(12, 40)] * (18 if way == "led" else 3)
    pair = Pair(LoopMuon, shapes, torch.float64, numerics="fast")
    near(pair)
    assert pair.report.algorithms == [
        f"Gram form: {len(shapes)} of [12, 40], 5 iterations"
    ]
    pair.gradients()
    pair.params[1].grad = pair.others[1].grad = None
    pair.step()
    near(pair)


def test_a_factor_that_changes_is_left() -> None:
    """It is a constant of the graph until it changes, and a number of calls then."""
    pair = Pair(Rated, [(12, 40)] * 2, torch.float64, numerics="fast")
    near(pair)
    for optimizer in (pair.plain, pair.compiled):
        optimizer.param_groups[0]["lr"] = 0.3
    near(pair)
    assert pair.report.algorithms == []


def test_one_iteration_is_left() -> None:
    pair = Pair(Once, [(12, 40)] * 2, torch.float64, numerics="fast")
    near(pair)
    assert pair.report.algorithms == []


def test_what_others_read_is_made() -> None:
    """The state reads X after two iterations, so chains end and begin there."""
    pair = Pair(Kept, [(12, 40)] * 2, torch.float64, numerics="fast")
    near(pair)
    assert pair.report.algorithms == ["Gram form: 4 of [12, 40], 2 iterations"]


@pytest.mark.slow
def test_matrices_that_are_not_wide_and_halves_are_left() -> None:
    pair = Pair(LoopMuon, [(12, 20)] * 2, torch.float64, numerics="fast")
    near(pair)
    assert pair.report.algorithms == []
    pair = Pair(LoopMuon, [(16, 64)] * 2, torch.bfloat16, numerics="fast")
    pair.gradients()
    pair.step()
    assert pair.report.algorithms == []


def test_bits_of_eager_need_eagers_products() -> None:
    pair = Pair(LoopMuon, [(12, 40)] * 2)
    pair.run(3)
    assert pair.report.algorithms == []


@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_matrices_without_numbers(number: float) -> None:
    pair = Pair(LoopMuon, [(12, 40)] * 2, torch.float64, numerics="fast")
    pair.gradients()
    for params in (pair.params, pair.others):
        params[0].grad.fill_(number)  # type: ignore[union-attr]
    pair.step()
    for p, q in zip(pair.params, pair.others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-10, equal_nan=True)
