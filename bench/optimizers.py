"""The optimizers that are measured, and how many bytes a step of each must move.

Two are torch's own, with a foreach and a fused form. Four are written here as a paper
prints them: a loop over the parameters, no list of tensors, no kernel by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen et al., Symbolic Discovery of Optimization Algorithms (2023)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                update = (beta1 * m + (1 - beta1) * p.grad).sign()
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Adafactor(Optimizer):
    """Shazeer and Stern, Adafactor (2018), algorithms 4 and 5, with relative steps."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-2,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip: float = 1.0,
        decay: float = 0.8,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "eps": eps, "clip": clip, "decay": decay, "step": 0}
        )

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step."""
        for group in self.param_groups:
            group["step"] += 1
            t = group["step"]
            beta2 = 1 - t ** -group["decay"]
            lr = min(group["lr"], t**-0.5)
            for p in group["params"]:
                state = self.state[p]
                square = p.grad.square() + group["eps"][0]
                if p.dim() >= 2:
                    if not state:
                        state["rows"] = torch.zeros_like(square.mean(-1, keepdim=True))
                        state["cols"] = torch.zeros_like(square.mean(-2, keepdim=True))
                    rows, cols = state["rows"], state["cols"]
                    rows.lerp_(square.mean(-1, keepdim=True), 1 - beta2)
                    cols.lerp_(square.mean(-2, keepdim=True), 1 - beta2)
                    v = rows * cols / rows.mean(-2, keepdim=True)
                else:
                    if not state:
                        state["v"] = torch.zeros_like(p)
                    v = state["v"].lerp_(square, 1 - beta2)
                update = p.grad / v.sqrt()
                size = update.square().mean().sqrt()
                update = update / (size / group["clip"]).clamp(min=1.0)
                scale = p.square().mean().sqrt().clamp(min=group["eps"][1])
                p.sub_(lr * scale * update)


class LAMB(Optimizer):
    """You et al., Large Batch Optimization for Deep Learning (2019), algorithm 2."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "step": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["m"], state["v"]
                m.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                m_hat = m / (1 - beta1 ** group["step"])
                v_hat = v / (1 - beta2 ** group["step"])
                update = m_hat / (v_hat.sqrt() + group["eps"])
                update = update + group["weight_decay"] * p
                length, change = p.norm(), update.norm()
                known = (length > 0) & (change > 0)
                ratio = torch.where(known, length / change, torch.ones_like(length))
                p.sub_(group["lr"] * ratio * update)


class AdEMAMix(Optimizer):
    """Pagliardini et al., The AdEMAMix Optimizer (2024), algorithm 1, no schedules."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        alpha: float = 5.0,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "alpha": alpha, "eps": eps}
        super().__init__(params, {**defaults, "weight_decay": weight_decay, "step": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Do one step."""
        for group in self.param_groups:
            group["step"] += 1
            beta1, beta2, beta3 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    for key in ("fast", "slow", "v"):
                        state[key] = torch.zeros_like(p)
                fast, slow, v = state["fast"], state["slow"], state["v"]
                fast.mul_(beta1).add_(p.grad, alpha=1 - beta1)
                slow.mul_(beta3).add_(p.grad, alpha=1 - beta3)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                top = fast / (1 - beta1 ** group["step"]) + group["alpha"] * slow
                bottom = (v / (1 - beta2 ** group["step"])).sqrt() + group["eps"]
                p.sub_(group["lr"] * (top / bottom + group["weight_decay"] * p))


def adamw(params: Iterable[Tensor], **flags: bool) -> Optimizer:
    """Return torch's AdamW; `flags`: foreach, fused."""
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01, **flags)  # type: ignore[arg-type]


def sgd(params: Iterable[Tensor], **flags: bool) -> Optimizer:
    """Return torch's SGD with momentum; `flags`: foreach, fused."""
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9, **flags)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Recipe:
    """An optimizer to measure.

    make: takes the parameters; flags too where `ours` is False.
    accesses: reads and writes per element that no implementation can do without, where
        what must wait for a reduction over a tensor reads anew. Times the element's
        bytes it is the least a step moves.
    ours: a for-loop of this module, that has no foreach or fused form.
    """

    name: str
    make: Callable[..., Optimizer]
    accesses: int
    why: str
    ours: bool = True


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("AdamW", adamw, 7, "reads p, g, m, v; writes p, m, v", ours=False),
        Recipe("SGD", sgd, 5, "reads p, g, m; writes p, m", ours=False),
        Recipe("Lion", Lion, 5, "reads p, g, m; writes p, m"),
        Recipe("Adafactor", Adafactor, 6, "reads g, p; then g; then g, p; writes p"),
        Recipe("LAMB", LAMB, 10, "reads p, g, m, v; writes m, v; then p, m, v; p"),
        Recipe("AdEMAMix", AdEMAMix, 9, "reads p, g, m, m, v; writes p, m, m, v"),
    )
}
