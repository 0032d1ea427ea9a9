"""What all traps have in common: a for-loop over lanes that does one thing to each."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Trap(Optimizer):
    """An optimizer of 16 lanes in two shapes; a trap overrides what it needs."""

    lanes = 16
    shapes: Any = ((3, 4), (5,))
    turns = 5

    def __init__(self, ps: Any) -> None:
        super().__init__(self.groups(ps), {"lr": 0.1})
        self.ready(self.members())

    @classmethod
    def params(cls) -> list[Any]:
        made = []
        for n in range(cls.lanes):
            drawn = torch.Generator().manual_seed(n)
            shape = cls.shapes[n % len(cls.shapes)]
            made.append(torch.nn.Parameter(torch.randn(shape, generator=drawn)))
        return made

    def groups(self, ps: Any) -> Any:
        return ps

    def members(self) -> list[Any]:
        return [p for group in self.param_groups for p in group["params"]]

    def ready(self, ps: list[Any]) -> None:
        """What the user prepares."""

    def before(self, turn: int, ps: list[Any]) -> None:
        """What the user does before a step, gradients being there."""

    def scale(self, i: int, p: Any, group: dict[str, Any]) -> Any:
        return 1.0

    def lane(self, i: int, p: Any, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] * self.scale(i, p, group))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.lane(i, p, group)


class Momentum(Trap):
    """With a tensor and a number in the state of each lane."""

    def lane(self, i: int, p: Any, group: dict[str, Any]) -> None:
        state = self.state[p]
        if not state:
            state["n"] = 0
            state["m"] = torch.zeros_like(p)
        state["n"] += 1
        state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
        p.sub_(state["m"], alpha=group["lr"] * self.scale(i, p, group))


def fill(p: Tensor, value: float) -> Tensor:
    """A tensor like a parameter's, of one number."""
    return torch.full_like(p.detach(), value)
