"""Optimizers that decompose a matrix of each lane at each step, one op each.

No paper has them. Each is gradient descent in which one op of `torch.linalg` decides
the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .matrices import Matrices


def gram(g: Tensor) -> Tensor:
    """A symmetric positive matrix of the rows of a gradient."""
    return g @ g.mT + torch.eye(g.size(0), dtype=g.dtype)


def _qr(g: Tensor) -> Tensor:
    q, r = torch.linalg.qr(g)
    return q @ r.sign()


def _eigh(g: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram(g))
    return (vectors / values.sqrt()) @ vectors.mT @ g


def _upper_eigh(g: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram(g), UPLO="U")
    return vectors.mT @ g * values.rsqrt().unsqueeze(1)


def _svd(g: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(g, full_matrices=False)
    return (u * (s + 0.1).log1p()) @ v


def _cholesky(g: Tensor) -> Tensor:
    return torch.linalg.cholesky(gram(g)).mT @ g


def _inverse(g: Tensor) -> Tensor:
    return torch.linalg.inv(gram(g)) @ g


def _solve(g: Tensor) -> Tensor:
    return torch.linalg.solve(gram(g), g)


def _solve_ex(g: Tensor) -> Tensor:
    return torch.linalg.solve_ex(gram(g), g)[0]


def _triangular(g: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(gram(g).tril(), g, upper=False)


def _lu(g: Tensor) -> Tensor:
    factors, pivots = torch.linalg.lu_factor(gram(g))
    return factors.triu() @ g + pivots.unsqueeze(1)


class Decomposing(Matrices):
    """Descent along what `how` makes of the momentum."""

    def __init__(self, params: Any, how: Callable[[Tensor], Tensor]) -> None:
        self.how = how
        super().__init__(params, momentum=0.9)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["m"] = torch.zeros_like(g)
        state["m"].mul_(group["momentum"]).add_(g)
        p.sub_(self.how(state["m"]), alpha=group["lr"])


def _of(how: Callable[[Tensor], Tensor]) -> Callable[..., Optimizer]:
    return lambda params, dtype=None: Decomposing(params, how)


#: Optimizers, each with the name of the op that it batches.
OPS: dict[str, tuple[Callable[..., Optimizer], str]] = {
    "qr": (_of(_qr), "linalg_qr"),
    "eigh": (_of(_eigh), "_linalg_eigh"),
    "upper": (_of(_upper_eigh), "_linalg_eigh"),
    "svd": (_of(_svd), "_linalg_svd"),
    "cholesky": (_of(_cholesky), "linalg_cholesky_ex"),
    "inverse": (_of(_inverse), "linalg_inv_ex"),
    "solve": (_of(_solve), "_linalg_solve_ex"),
    "solve_ex": (_of(_solve_ex), "_linalg_solve_ex"),
    "triangular": (_of(_triangular), "linalg_solve_triangular"),
    "lu": (_of(_lu), "linalg_lu_factor_ex"),
}
