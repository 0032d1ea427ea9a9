"""Optimizers that are products of matrices, written anew from their formulas.

Muon (Jordan et al. 2024), NorMuon (Li et al. 2025), Muon of single heads, SOAP (Vyas
et al. 2024), Shampoo (Gupta et al. 2018), and the PSGD of a Kronecker product (Li 2018,
its triangular form). `TurningSoap` and `EighShampoo` decompose matrices once in `every`
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: The coefficients of the quintic iteration, and how often it is done.
A, B, C = 3.4445, -4.7750, 2.0315
ITERATIONS = 5


def newton_schulz(g: Tensor, dtype: torch.dtype) -> Tensor:
    """A matrix, or a batch of them, with its singular values brought near 1."""
    x = g.to(dtype)
    tall = g.size(-2) > g.size(-1)
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        update = B * gram + C * gram @ gram
        x = A * x + update @ x
    return x.mT if tall else x


class Matrices(Optimizer):
    """Optimizers of one rate whose lanes are treated one by one."""

    def __init__(self, params: Iterable[Tensor], **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.02, **defaults})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.update(p, p.grad, self.state[p], group)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        raise NotImplementedError


class LoopMuon(Matrices):
    """Muon with Nesterov momentum; the scale of a matrix follows its shape."""

    def __init__(
        self, params: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(params, momentum=0.95)
        self.dtype = dtype

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(g)
        buffer = state["momentum_buffer"]
        buffer.lerp_(g, 1 - group["momentum"])
        g = g.lerp(buffer, group["momentum"])
        shape = g.shape
        if g.ndim == 4:
            g = g.view(len(g), -1)
        x = newton_schulz(g, self.dtype).view(shape)
        p.add_(x, alpha=-group["lr"] * max(1, g.size(-2) / g.size(-1)) ** 0.5)


class NorMuon(Matrices):
    """Muon whose rows are divided by the root of their mean square over time."""

    def __init__(
        self, params: Iterable[Tensor], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        super().__init__(params, momentum=0.95, beta2=0.95)
        self.dtype = dtype

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(g)
            state["second"] = torch.zeros_like(g[..., :1])
        buffer, second = state["momentum_buffer"], state["second"]
        buffer.lerp_(g, 1 - group["momentum"])
        x = newton_schulz(g.lerp(buffer, group["momentum"]), self.dtype).to(g.dtype)
        norm = x.norm()
        second.lerp_(x.square().mean(dim=-1, keepdim=True), 1 - group["beta2"])
        x = x / (second.sqrt() + 1e-8)
        x = x * (norm / (x.norm() + 1e-8))
        p.mul_(1 - group["lr"] * 0.1).add_(x, alpha=-group["lr"])


class HeadMuon(LoopMuon):
    """Muon of each head's rows, as batches of matrices."""

    heads = 2

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(g)
        buffer = state["momentum_buffer"]
        buffer.mul_(group["momentum"]).add_(g)
        x = newton_schulz(buffer.view(self.heads, -1, g.size(-1)), self.dtype)
        p.add_(x.reshape(g.shape), alpha=-group["lr"])


class Soap(Matrices):
    """Adam in a basis that turns; the basis is what the test sets, every step alike."""

    def __init__(self, params: Iterable[Tensor], dtype: Any = None) -> None:
        super().__init__(params, lr=3e-3, betas=(0.95, 0.95), eps=1e-8)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["m"], state["v"] = torch.zeros_like(g), torch.zeros_like(g)
            for name, n in (("left", g.size(0)), ("right", g.size(1))):
                state[name] = torch.zeros(n, n, dtype=g.dtype)
                state["q" + name] = torch.eye(n, dtype=g.dtype)
        state["left"].lerp_(g @ g.mT, 1 - beta2)
        state["right"].lerp_(g.mT @ g, 1 - beta2)
        turned = state["qleft"].mT @ g @ state["qright"]
        state["m"].lerp_(g, 1 - beta1)
        state["v"].mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        m = state["qleft"].mT @ state["m"] @ state["qright"]
        step = m / (state["v"].sqrt() + group["eps"])
        p.sub_(state["qleft"] @ step @ state["qright"].mT, alpha=group["lr"])
        # one power iteration towards the eigenvectors, whose columns are scaled
        for name in ("left", "right"):
            q = state[name] @ state["q" + name]
            state["q" + name].copy_(q / (q.norm(dim=0, keepdim=True) + 1e-12))


class Shampoo(Matrices):
    """Preconditioners whose inverse roots are a coupled Newton iteration."""

    def __init__(self, params: Iterable[Tensor], dtype: Any = None) -> None:
        super().__init__(params, lr=1e-2, eps=1e-3)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            for name, n in (("left", g.size(0)), ("right", g.size(1))):
                state[name] = group["eps"] * torch.eye(n, dtype=g.dtype)
        state["left"].addmm_(g, g.mT)
        state["right"].add_(g.mT @ g)
        left, right = (inverse_root(state[name]) for name in ("left", "right"))
        p.sub_(left @ g @ right, alpha=group["lr"])


class TurningSoap(Matrices):
    """Adam in a basis that a QR decomposition turns, once in `every` steps."""

    every = 3

    def __init__(self, params: Iterable[Tensor], dtype: Any = None) -> None:
        super().__init__(params, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["step"] = 0
            state["m"], state["v"] = torch.zeros_like(g), torch.zeros_like(g)
            for name, n in (("left", g.size(0)), ("right", g.size(1))):
                state[name] = torch.zeros(n, n, dtype=g.dtype)
                state["q" + name] = torch.eye(n, dtype=g.dtype)
        state["step"] += 1
        # no write of this step depends on these
        state["left"].lerp_(g @ g.mT, 1 - beta2)
        state["right"].lerp_(g.mT @ g, 1 - beta2)
        turned = state["qleft"].mT @ g @ state["qright"]
        state["m"].lerp_(g, 1 - beta1)
        state["v"].lerp_(turned.square(), 1 - beta2)
        m = state["qleft"].mT @ state["m"] @ state["qright"]
        step = m / (state["v"].sqrt() + group["eps"])
        p.sub_(state["qleft"] @ step @ state["qright"].mT, alpha=group["lr"])
        if state["step"] % self.every == 0:
            for name in ("left", "right"):
                q, _ = torch.linalg.qr(state[name] @ state["q" + name])
                state["q" + name].copy_(q)


class EighShampoo(Matrices):
    """Preconditioners whose inverse roots come from eigenvalues, once in `every` steps;
    they are new tensors each time.
    """

    every = 3

    def __init__(self, params: Iterable[Tensor], dtype: Any = None) -> None:
        super().__init__(params, lr=1e-2, eps=1e-3)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            state["step"] = 0
            for name, n in (("left", g.size(0)), ("right", g.size(1))):
                state[name] = group["eps"] * torch.eye(n, dtype=g.dtype)
        state["left"].add_(g @ g.mT)
        state["right"].add_(g.mT @ g)
        if state["step"] % self.every == 0:
            for name in ("left", "right"):
                values, vectors = torch.linalg.eigh(state[name])
                roots = values.clamp(min=1e-10).pow(-0.25)
                state["i" + name] = (vectors * roots) @ vectors.mT
        state["step"] += 1
        p.sub_(state["ileft"] @ g @ state["iright"], alpha=group["lr"])


class KronPsgd(Matrices):
    """PSGD: two triangular factors that whiten gradients, by triangular solves."""

    def __init__(self, params: Iterable[Tensor], dtype: Any = None) -> None:
        super().__init__(params, lr=1e-2, precondition_lr=0.1)

    def update(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        if not state:
            for name, n in (("left", g.size(0)), ("right", g.size(1))):
                state[name] = torch.eye(n, dtype=g.dtype)
        left, right = state["left"], state["right"]
        a = left @ g @ right.mT
        b = torch.linalg.solve_triangular(
            right, torch.linalg.solve_triangular(left.mT, g, upper=False),
            upper=True, left=False,
        )  # fmt: skip
        for q, one, other in ((left, a @ a.mT, b @ b.mT), (right, a.mT @ a, b.mT @ b)):
            scale = group["precondition_lr"] / ((one + other).norm() + 1e-12)
            q.sub_(torch.triu(one - other) @ q * scale)
        p.sub_(left.mT @ (left @ g @ right.mT) @ right, alpha=group["lr"])


def inverse_root(x: Tensor) -> Tensor:
    """x ** (-1/4) of a positive matrix, by a coupled Newton iteration."""
    n = x.size(0)
    one = torch.eye(n, dtype=x.dtype)
    z = 5 / (2 * x.norm())
    m, root = x * z, one * z**0.25
    for _ in range(4):
        t = (5 * one - m) / 4
        m = t @ t @ t @ t @ m
        root = root @ t
    return root


Optimizers = Callable[..., Optimizer]
EVERY: dict[str, Optimizers] = {
    "loop": LoopMuon,
    "normuon": NorMuon,
    "heads": HeadMuon,
    "soap": Soap,
    "shampoo": Shampoo,
}
#: Those that decompose matrices, or solve with them; LAPACK lacks halves.
DECOMPOSING: dict[str, Optimizers] = {
    "turning": TurningSoap,
    "eigh": EighShampoo,
    "kron": KronPsgd,
}
