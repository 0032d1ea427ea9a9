"""Compare decompositions of a batch with those of single matrices.

LAPACK treats a batch matrix by matrix. Its paths depend on the contents: on ranks, on
equal eigenvalues, on pivots. So the matrices of a trial are of all these kinds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..capture.aten.dtypes import NAMED_DTYPES
from ..ir.products import Trial
from .matrix_calls import each_matrix, results_of
from .matrix_rows import Numbers, padded_tensor, rows_of, same_bits

#: Least number of compared results; small matrices have more rounds for it.
COMPARED = 4096
#: Size of the numbers beside a diagonal, of matrices that are nearly singular.
_TINY = 2.0**-20

Kind = Callable[[torch.Tensor, Numbers], None]


def _normal(t: torch.Tensor, numbers: Numbers) -> None:
    t.copy_(numbers.window(numbers.normal, t.shape))


def _spread(t: torch.Tensor, numbers: Numbers) -> None:
    t.copy_(numbers.window(numbers.spread, t.shape))


def _positive(t: torch.Tensor, numbers: Numbers) -> None:
    """Write a symmetric positive matrix, if it is square."""
    _normal(t, numbers)
    if t.shape[-1] == t.shape[-2]:
        t.copy_(t @ t.mT / t.shape[-1])
        t.diagonal().add_(0.125)


def _low_rank(t: torch.Tensor, numbers: Numbers) -> None:
    """Write a matrix of a third of the rank, symmetric if it is square."""
    m, n = t.shape
    rank = max(1, min(m, n) // 3)
    left = numbers.window(numbers.normal, (m, rank)).to(t.dtype)
    right = numbers.window(numbers.normal, (n, rank)).to(t.dtype)
    t.copy_(left @ (left if m == n else right).mT)


def _graded(t: torch.Tensor, numbers: Numbers) -> None:
    """Write rows and columns of falling sizes."""
    _normal(t, numbers)
    for dim in (0, 1):
        n = t.shape[dim]
        sizes = 2.0 ** -torch.arange(n, dtype=t.dtype).clamp(max=20)
        t.mul_(sizes.view(-1, 1) if dim == 0 else sizes)


def _equal(t: torch.Tensor, numbers: Numbers) -> None:
    """Write a diagonal of two numbers, nearly."""
    _normal(t, numbers)
    t.mul_(_TINY)
    t.diagonal()[::2].add_(1.0)
    t.diagonal()[1::2].add_(3.0)


def _identity(t: torch.Tensor, numbers: Numbers) -> None:
    t.zero_()
    t.diagonal().fill_(1.0)


def _zero(t: torch.Tensor, numbers: Numbers) -> None:
    t.zero_()


def _triangular(t: torch.Tensor, numbers: Numbers) -> None:
    """Write a lower triangle whose numbers elsewhere are small."""
    _normal(t, numbers)
    t.sub_(t.triu(1) * (1 - _TINY))


def _not_finite(t: torch.Tensor, numbers: Numbers) -> None:
    _normal(t, numbers)
    t[0, -1] = float("nan")
    t[-1, 0] = float("inf")


KINDS: tuple[Kind, ...] = (
    *(_normal, _positive, _low_rank, _graded, _equal),
    *(_identity, _spread, _triangular, _zero, _not_finite),
)


def rows_agree(trial: Trial) -> bool:
    """Have all rows of one batched call the bits of single calls, for all kinds?

    A round whose matrices the op refuses counts if it refuses both ways.
    """
    numbers = Numbers(max(math.prod(shape) for shape, _, _ in trial.layouts))
    size = trial.rows * sum(math.prod(x.shape) for x in trial.results)
    more = max(2, -(-COMPARED // max(1, size)) - len(KINDS))
    rounds = [(kind,) for kind in KINDS] + [KINDS[:-2]] * more
    agreed = 0
    with torch.no_grad():
        for number, kinds in enumerate(rounds):
            found = _round(trial, kinds, number, numbers)
            if found is False:
                return False
            agreed += found is not None
    return agreed > 0


def _round(
    trial: Trial, kinds: Sequence[Kind], number: int, numbers: Numbers
) -> bool | None:
    """Compare one round; None if the op refuses a matrix both ways."""
    dtype, n = NAMED_DTYPES[trial.dtype], trial.rows
    stacked = [padded_tensor(x, dtype, trial.device) for x in trial.stacked]
    singles: list[list[torch.Tensor]] = [[] for _ in range(n)]
    for k, (whole, layout) in enumerate(zip(stacked, trial.layouts, strict=True)):
        shared = whole.stride(0) == 0 and n > 1
        for row in range(n):
            single = padded_tensor(layout, dtype, trial.device)
            if shared and row:
                single = singles[0][k]
            else:
                # what is solved for is no matrix of a kind
                kind = _normal if k else kinds[(number + row) % len(kinds)]
                kind(single, numbers)
                rows_of(whole, n, 2)[row].copy_(single)
            singles[row].append(single)
    outs = [
        padded_tensor(
            ((n, *x.shape), (math.prod(x.shape), *x.stride), 0),
            *(NAMED_DTYPES[x.dtype], trial.device),
        )
        for x in trial.results
    ]
    refused = False
    try:
        each_matrix(trial.op, stacked, outs, trial.options)
    except RuntimeError:
        refused = True
    alone: list[tuple[torch.Tensor, ...]] = []
    try:
        alone = [results_of(trial.op, row, trial.options) for row in singles]
    except RuntimeError:
        return None if refused else False
    if refused:
        return False
    return all(
        # the next call gets a row with the strides that it has in eager
        one.stride() == rows_of(out, n, 2)[row].stride()
        and same_bits(one, rows_of(out, n, 2)[row])
        for row, results in enumerate(alone)
        for one, out in zip(results, outs, strict=True)
    )
