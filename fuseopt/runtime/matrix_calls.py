"""Calls on matrices, for one matrix or for a batch of them.

Products have a second op for batches. Ops of `BY_MATRIX` treat a tensor of three
dimensions matrix by matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..capture.aten.added_products import added
from ..compat import bound_op
from ..ir.products import IN_PLACE, SCALED, Options

_ATEN = torch.ops.aten
_NUMBERS = {
    "linalg_qr": 1,
    "_linalg_eigh": 1,
    "_linalg_svd": 1,
    "linalg_cholesky_ex": 1,
    "cholesky": 1,
    "linalg_inv_ex": 1,
    "linalg_lu_factor_ex": 1,
    "_linalg_solve_ex": 2,
    "linalg_solve_triangular": 2,
    "triu": 1,
    "tril": 1,
    "_linalg_check_errors": 1,
}
#: Ops that treat a batch matrix by matrix, each with the number of its tensors. Some
#: versions of torch lack an op: 2.15 has no `cholesky`.
BY_MATRIX: dict[Any, int] = {
    getattr(_ATEN, name).default: n
    for name, n in _NUMBERS.items()
    if hasattr(_ATEN, name)
}
#: Options of single calls that differ for a batch. A message about one matrix of many
#: names it, but then the single calls raise theirs.
OF_BATCHES: dict[str, dict[str, object]] = {
    "_linalg_check_errors": {"is_matrix": False}
}


@functools.cache
def by_matrix(op: str) -> Callable[..., Any]:
    """Return the function of an op of BY_MATRIX, by its name."""
    return bound_op(getattr(_ATEN, op).default)


def batched(
    op: str,
    operands: Sequence[torch.Tensor],
    out: torch.Tensor,
    scales: Sequence[float],
) -> None:
    """Make the batched call of products `op`, which writes every row of `out`."""
    if len(operands) == 2:
        torch.bmm(*operands, out=out)
    else:
        beta, alpha = scales
        torch.baddbmm(*operands, beta=beta, alpha=alpha, out=out)


def scaled_sum(
    add: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float,
    alpha: float,
) -> torch.Tensor:
    """Compute SCALED as eager does, in several calls."""
    left = left if alpha == 1 else left * alpha
    return add * beta + torch.mm(left, right)


def product_call(op: str) -> Callable[..., torch.Tensor]:
    """Return the function of one product, by its op."""
    own: dict[str, Callable[..., torch.Tensor]] = {SCALED: scaled_sum, IN_PLACE: added}
    found: Callable[..., torch.Tensor] = own.get(op) or getattr(torch, op)
    return found


def each_matrix(
    op: str,
    operands: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    options: Options,
) -> None:
    """Call an op of BY_MATRIX on batches, and copy its results into `outs`.

    It cannot write them: `linalg_qr` goes another way where its results share a
    storage, as stacks in the arena do. Raises what the op raises for a matrix that it
    does not take.
    """
    options = (*options, *OF_BATCHES.get(op, {}).items())
    for out, result in zip(outs, results_of(op, operands, options), strict=True):
        out.copy_(result)


def results_of(
    op: str, operands: Sequence[torch.Tensor], options: Options
) -> tuple[torch.Tensor, ...]:
    """Call an op of BY_MATRIX; return its results."""
    made = by_matrix(op)(*operands, **dict(options))
    return (made,) if isinstance(made, torch.Tensor) else tuple(made or ())
