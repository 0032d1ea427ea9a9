"""Optimizers that look odd and treat lanes alike: a few lanes lead."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.uniformity.divergence.base import Base

EPS = 1e-8
DECAYS = {1: 0.5, 2: 0.9}
NAMES = ("m", "v")


def bias(beta: float, t: int) -> float:
    return 1 - beta**t


class Plain(Base):
    pass


class ByDims(Base):
    """A table by the number of dimensions."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * DECAYS[p.dim()]


class ByShape(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / math.sqrt(p.numel())


class ByNorm(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] / max(1.0, p.grad.norm().item())


class ByCondition(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        if p.ndim == 1:
            return group["lr"] * 0.5
        return group["lr"]


class Biased(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        t = self.state[p]["t"]
        return group["lr"] * math.sqrt(bias(0.99, t)) / bias(0.9, t)


class Attributes(Base):
    """Numbers, flags and tables of the optimizer's own."""

    nesterov = True

    def prepare(self, params: list[Tensor]) -> None:
        self.scale = 2.0
        self.table = {"fast": 1.5}
        self.mode = "fast"

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        found = self.scale if self.nesterov else 1.0
        return group["lr"] * found * self.table[self.mode]


class Optional(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        extra = getattr(self, "extra", None)
        return group["lr"] if extra is None else extra


class Counts(Base):
    """A counter of steps in the group."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["t"] = group.get("t", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["t"])


class Lists(Base):
    """Lists of lanes, gone through together."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p, g in zip(params, grads, strict=True):
                p.sub_(g, alpha=group["lr"])
            norms = [g.norm().item() for g in grads]
            for i, p in enumerate(params):
                p.mul_(1 - 0.01 / (1 + norms[i]))


class Foreach(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params, grads, ms = [], [], []
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "m" not in state:
                    state["m"] = torch.zeros_like(p)
                params.append(p)
                grads.append(p.grad)
                ms.append(state["m"])
            torch._foreach_lerp_(ms, grads, 0.1)
            torch._foreach_add_(params, ms, alpha=-group["lr"])


class Nested(Base):
    """Functions that the step defines."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        decay = 0.9

        def update(p: Tensor, lr: float) -> None:
            p.mul_(decay).sub_(p.grad, alpha=lr)

        scale = lambda x: x * 2  # noqa: E731
        for group in self.param_groups:
            for p in group["params"]:
                update(p, scale(group["lr"]))


class Flags(Base):
    """Something gathered over the lanes."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            flat = False
            for p in group["params"]:
                flat |= p.dim() == 1
            vectors = any(p.dim() == 1 for p in group["params"])
            rate = group["lr"] * (0.5 if flat and vectors else 1.0)
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)


class Keys(Base):
    """State by names out of a table."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            for key in NAMES:
                if key not in state:
                    state[key] = torch.zeros_like(p)
            for key in NAMES:
                state[key].mul_(0.9).add_(p.grad)
            p.sub_(state["m"] / (state["v"].abs() + EPS), alpha=0.1)


class Newton(Base):
    """A loop within a lane."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            x = p.grad / (p.grad.norm() + EPS)
            for _ in range(3):
                x = 1.5 * x - 0.5 * x * x * x
            p.sub_(x, alpha=0.1)


class Clipped(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            lr = group["lr"]
            for p in group["params"]:
                norm = p.grad.norm()
                p.sub_(p.grad * torch.clamp(1.0 / (norm + EPS), max=1.0), alpha=lr)


class Continued(Base):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() == 1:
                    p.sub_(p.grad)
                    continue
                p.sub_(p.grad, alpha=group["lr"])


class Inherits(Plain):
    """What a base class does, and more."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return super().rate(i, p, group) * 2


class Stated(Base):
    @staticmethod
    def weight(t: int) -> float:
        return 1 / math.sqrt(t)

    @property
    def factor(self) -> float:
        return 0.5

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"] * self.weight(self.state[p]["t"]) * self.factor


class Betas(Base):
    def prepare(self, params: list[Tensor]) -> None:
        self.param_groups[0]["betas"] = (0.9, 0.99)

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        beta1, beta2 = group["betas"]
        return group["lr"] * (1 - beta1) / (1 - beta2 ** self.state[p]["t"])


class Scheduled(Base):
    """A number that moves is hidden in a minimum, for all lanes alike."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return min(group["lr"], 1 / self.state[p]["t"])


class Raises(Base):
    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        if p.grad.is_sparse:
            raise RuntimeError(f"lane {i} of {len(group['params'])} is sparse: {p}")
        return group["lr"]


HARMLESS = [
    x for x in list(vars().values()) if isinstance(x, type) and issubclass(x, Base)
]
HARMLESS.remove(Base)
