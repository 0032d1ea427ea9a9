"""Matrices that begin at any byte, that have other views, and values without vectors.

What ATen does depends on more than the shapes of a call: on the place of a result, on
whether an operand requires a gradient, and on whether vectors are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from tests.numerics.test_products import SLOW, Pair
from tests.papers.matrices import Matrices

DTYPES = (torch.float32, torch.float64)
Update = Callable[[Tensor, Tensor], None]


def _of(update: Update) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer whose lanes are updated like this."""

    class Updating(Matrices):
        def __init__(self, params: Any, dtype: Any = None) -> None:
            super().__init__(params)

        def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
            update(p, g)

    return Updating


def _lower(p: Tensor, g: Tensor) -> None:
    p[1:].addmm_(g[1:], g.mT @ g, alpha=-0.01)


def _upper(p: Tensor, g: Tensor) -> None:
    p[:-1].addmm_(g[:-1], g.mT @ g, alpha=-0.01)


def _of_a_temporary(p: Tensor, g: Tensor) -> None:
    x = g * 0.5
    x[1:].addmm_(p[1:], p.mT @ p, beta=0.5)
    p.sub_(x, alpha=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 4, 9])
@pytest.mark.parametrize("update", [_lower, _upper, _of_a_temporary])
def test_a_product_added_in_place_at_any_byte(
    update: Update, rows: int, dtype: torch.dtype
) -> None:
    """The library of products has other sums where a result is not aligned."""
    pair = Pair(_of(update), [(rows, 9)] * 3, dtype)
    pair.run(6)
    assert not pair.report.fallback


VALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "eigvalsh": lambda g, a: torch.linalg.eigvalsh(a)[-1],
    "upper": lambda g, a: torch.linalg.eigvalsh(a, UPLO="U").sum(),
    "svdvals": lambda g, a: torch.linalg.svdvals(g).sum(),
    "batch": lambda g, a: torch.linalg.svdvals(torch.stack([g, g + 1])).sum(),
    "matrix_norm": lambda g, a: torch.linalg.matrix_norm(g, ord=2),
    "least": lambda g, a: torch.linalg.norm(g, -2),
    "nuclear": lambda g, a: torch.linalg.norm(g, "nuc") + torch.norm(g, "nuc"),
    "method": lambda g, a: g.norm(p="nuc"),
    "cond": lambda g, a: torch.linalg.cond(a),
    "rank": lambda g, a: torch.linalg.matrix_rank(a, hermitian=True).to(a.dtype),
    "old": lambda g, a: torch.svd(g, compute_uv=False)[1].sum(),
    # eager has vectors here, which nothing reads
    "eigh": lambda g, a: torch.linalg.eigh(a)[0].sum(),
    "svd": lambda g, a: torch.linalg.svd(g)[1].sum() + torch.svd(g)[1].sum(),
}


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=SLOW)])
@pytest.mark.parametrize("name", VALUES)
def test_values_without_vectors(name: str, dtype: torch.dtype) -> None:
    def update(p: Tensor, g: Tensor) -> None:
        a = g @ g.mT + torch.eye(g.size(0), dtype=g.dtype)
        p.sub_(g / (VALUES[name](g, a) + 1), alpha=0.1)

    pair = Pair(_of(update), [(7, 12)] * 2 + [(24, 24)] * 2, dtype)
    pair.run(4)
    assert pair.report.launches


def test_eigenvalues_of_any_matrix_run_in_eager() -> None:
    """No op computes them alone while a step is recorded."""

    def update(p: Tensor, g: Tensor) -> None:
        p.sub_(g * torch.linalg.eigvals(g).real.max(), alpha=0.1)

    pair = Pair(_of(update), [(7, 7)] * 2)
    pair.run(3)
    assert any("vectors" in r.fallback for r in fuseopt.reports()[pair.seen :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requires", [True, False])
def test_a_batch_times_a_parameter(requires: bool, dtype: torch.dtype) -> None:
    """`matmul` folds the batch if the matrix requires a gradient, in any mode."""

    def update(p: Tensor, g: Tensor) -> None:
        x = torch.stack([g, 2 * g]).mT
        y = (x @ (p if requires else p.detach())).sum(0)
        p.sub_(g @ y / (y.norm() + 1e-6), alpha=0.1)

    pair = Pair(_of(update), [(20, 16), (15, 24), (17, 6), (9, 9)], dtype)
    pair.run(4)
    names = {name for name, _ in pair.report.externs}
    assert ("aten.bmm.default" in names) is not requires


def _diagonal(x: Tensor) -> None:
    x.diagonal().add_(0.5)


def _row(x: Tensor) -> None:
    x[1].mul_(2.0)


def _column(x: Tensor) -> None:
    x.mT[0].sub_(1.0)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("change", [_diagonal, _row, _column])
def test_a_kernel_writes_a_view_of_a_copied_result(
    change: Callable[[Tensor], None], lanes: int
) -> None:
    """One product of a batch is read by a single call, so its results lie apart. A
    kernel finds their views by address.
    """

    def update(p: Tensor, g: Tensor) -> None:
        x, y = g * 2, g * 3
        a, b = x @ x.mT, y @ y.mT
        change(a)
        p.add_(b @ y, alpha=0.01)
        p[:, :2].add_(a, alpha=0.01)

    pair = Pair(_of(update), [(2, 7)] * lanes)
    pair.run(4)
    assert {b.rows for b in pair.report.batches} >= {2 * lanes}
