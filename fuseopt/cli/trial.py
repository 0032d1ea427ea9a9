"""The optimizer that `doctor` compiles: momentum, a root and a division."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import Optimizer


class Trial(Optimizer):
    """A loop over parameters, written as users write theirs."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        super().__init__(params, {"lr": 0.1, "beta": 0.9})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Move each parameter by its momentum over the root of its gradient's size."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                size = p.grad.abs().sqrt().add_(1e-8)
                state["momentum"].lerp_(p.grad / size, 1 - group["beta"])
                p.sub_(state["momentum"], alpha=group["lr"])
