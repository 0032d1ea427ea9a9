"""The family of Muon, written anew from its formulas, and products in other forms.

`AdaMuon` (Si et al. 2025), `CautiousMuon` (a mask of Liang et al. 2024), `ClippedMuon`
(the rescale of MuonClip, Kimi Team 2025), `Dion` (Ahn et al. 2025, one power iteration
with a QR), `ExpertMuon` (a batch of matrices), and Muon of convolutions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.papers.matrices import LoopMuon, Matrices, newton_schulz


class _Momentum(Matrices):
    """Optimizers of one momentum; `dtype` is that of the iterations."""

    def __init__(
        self, params: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(params, momentum=0.9)
        self.dtype = dtype

    def averaged(self, g: Tensor, state: Any, group: Any) -> Tensor:
        if "m" not in state:
            state["m"] = torch.zeros_like(g)
        m: Tensor = state["m"].lerp_(g, 1 - group["momentum"])
        return m


class AdaMuon(_Momentum):
    """A second moment of each element of the orthogonal matrix, and its root's size."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        m = self.averaged(g, state, group)
        state["step"] = state.get("step", 0) + 1
        x = newton_schulz(torch.sign(m), self.dtype).to(g.dtype)
        if "v" not in state:
            state["v"] = torch.zeros_like(g)
        state["v"].mul_(0.95).addcmul_(x, x, value=0.05)
        x = x / (state["v"].sqrt() / (1 - 0.95 ** state["step"]) ** 0.5 + 1e-8)
        x = x * (0.2 * g.numel() ** 0.5 / (x.norm() + 1e-8))
        p.mul_(1 - group["lr"] * 0.1).add_(x, alpha=-group["lr"])


class CautiousMuon(_Momentum):
    """Moves and decays only where signs agree."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        m = self.averaged(g, state, group)
        x = newton_schulz(m, self.dtype).to(g.dtype)
        mask = (x * g > 0).to(g.dtype)
        mask = mask / mask.mean().clamp(min=1e-3)
        p.mul_(1 - group["lr"] * 0.1 * (p * x >= 0).to(g.dtype))
        p.sub_(x * mask, alpha=group["lr"])


class ClippedMuon(_Momentum):
    """A matrix shrinks by the root of what its largest logit exceeds."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        m = self.averaged(g, state, group)
        if "logit" not in state:
            state["logit"] = torch.full((), 3.0)
        x = newton_schulz(m, self.dtype).to(p.dtype)
        scale = 0.2 * max(p.shape) ** 0.5
        p.mul_(1 - group["lr"] * 0.1).add_(x, alpha=-group["lr"] * scale)
        p.mul_(torch.sqrt(torch.clamp(2.0 / state["logit"], max=1.0)))


class ExpertMuon(_Momentum):
    """Each matrix of a batch on its own."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        m = self.averaged(g, state, group)
        p.sub_(newton_schulz(m, self.dtype), alpha=group["lr"])


class Dion(_Momentum):
    """One power iteration towards a matrix of low rank; the rest stays for later."""

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["m"] = torch.zeros_like(g)
            state["q"] = torch.eye(g.size(1), dtype=g.dtype)[:, :4].contiguous()
        b = state["m"] + g
        left, _ = torch.linalg.qr(b @ state["q"])
        right = b.mT @ left
        state["m"].copy_(b - 0.1 * (left @ right.mT))
        state["q"].copy_(right / (right.norm(dim=0, keepdim=True) + 1e-8))
        p.sub_(left @ state["q"].mT, alpha=group["lr"])


class _Products(_Momentum):
    """Two products, in one of torch's forms."""

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        p.sub_(self.product(self.averaged(g, state, group) * 0.1), alpha=group["lr"])


class _Einsum(_Products):
    def product(self, x: Tensor) -> Tensor:
        return torch.einsum("ij,jk->ik", torch.einsum("ij,kj->ik", x, x), x)


class _Tensordot(_Products):
    def product(self, x: Tensor) -> Tensor:
        return torch.tensordot(torch.tensordot(x, x, dims=[[1], [1]]), x, dims=1)


class _Linear(_Products):
    def product(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.nn.functional.linear(x, x), x)


class _Several(_Products):
    def product(self, x: Tensor) -> Tensor:
        return torch.linalg.multi_dot([x, x.mT, x])


class _Power(_Products):
    def product(self, x: Tensor) -> Tensor:
        return torch.linalg.matrix_power(x @ x.mT, 3) @ x


Optimizers = Callable[..., Optimizer]
FAMILY: dict[str, Optimizers] = {
    "adamuon": AdaMuon,
    "cautious": CautiousMuon,
    "clipped": ClippedMuon,
    "experts": ExpertMuon,
    "convolutions": LoopMuon,
}
EINSUM: dict[str, Optimizers] = {
    "einsum": _Einsum,
    "tensordot": _Tensordot,
    "linear": _Linear,
    "multi_dot": _Several,
    "matrix_power": _Power,
}
