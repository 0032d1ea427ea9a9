"""Optimizers whose steps read what Dynamo and fuseopt must compare at each call.

A test loads this module anew for each run, so that runs share nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

GAIN = 1.25
TABLE = {"a": 0.5, "deep": [1.0, 2.0]}


def damped(x: Any) -> Any:
    return x * 0.5


class Base(Optimizer):
    """A class between torch's and the user's."""

    floor = 0.25

    def scaled(self, x: Any) -> Any:
        return x * 1.5


class Own(Base):
    """A for-loop with globals, class attributes, a helper, an own attribute."""

    slope = 2.0

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr, "rate": 0.5, "on": True})
        self.factor: Any = 0.75
        self.count: Any = 3
        self.numbers: Any = [1.0, 2.0]
        self.nested: Any = {"x": [0.5, {"y": 1.5}]}

    @property
    def cooled(self) -> float:
        return 0.875

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do a step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["buf"] = torch.zeros_like(p)
                g = self.scaled(damped(p.grad)) * GAIN * TABLE["a"]
                g = g * (self.floor + self.slope * self.cooled)
                g = g * self.factor * self.numbers[1] + self.nested["x"][1]["y"]
                g = g * TABLE["deep"][1] + abs(-self.count)
                state["buf"].mul_(group["rate"]).add_(g)
                if group["on"]:
                    p.add_(state["buf"], alpha=-group["lr"])


class Noting(Optimizer):
    """It keeps the last rate of each group in an attribute."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr})
        self.last: Any = None
        self.notes: list[Any] = [0.0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do a step."""
        for group in self.param_groups:
            self.last = group["lr"]
            self.notes[0] = group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


class MyAdamW(AdamW):
    """torch's, with an own class between."""


class MySGD(SGD):
    """torch's, with an own class between."""


def adamw(params: Any) -> Optimizer:
    return MyAdamW(params, 1e-2)


def momentum(params: Any) -> Optimizer:
    return MySGD(params, 1e-2, momentum=0.9, weight_decay=0.1)


def tensor_rate(params: Any) -> Optimizer:
    return MyAdamW(params, torch.tensor(1e-2))
