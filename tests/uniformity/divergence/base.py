"""What traps and harmless optimizers have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Base(Optimizer):
    """Momentum in a loop over parameters; `rate` is another number in each trap."""

    def __init__(self, params: Any, lr: float = 0.1, **own: Any) -> None:
        super().__init__(params, {"lr": lr})
        for name, value in own.items():
            setattr(self, name, value)
        self.prepare([p for g in self.param_groups for p in g["params"]])

    def prepare(self, params: list[Tensor]) -> None:
        """Set up what the trap needs, before the first step."""

    def spring(self, params: list[Tensor]) -> None:
        """Change what the trap depends on, between two steps."""

    def rate(self, i: int, p: Tensor, group: dict[str, Any]) -> Any:
        return group["lr"]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["t"] = 0
                    state["m"] = torch.zeros_like(p)
                state["t"] += 1
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.sub_(state["m"] * self.rate(i, p, group))
