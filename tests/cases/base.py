"""What all scenarios have in common: a loop over lanes that does one thing to each."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.optim import Optimizer


class Ring(list[Any]):
    """Parameters; a place past the last is counted on from the first."""

    def __getitem__(self, k: Any) -> Any:
        return super().__getitem__(k % len(self) if isinstance(k, int) else k)


class Scenario(Optimizer):
    """An optimizer of lanes in two shapes; a scenario overrides what it needs."""

    turns = 6

    def __init__(self, ps: Any) -> None:
        super().__init__(self.groups(ps), {"lr": 0.1})
        self.ready(Ring(ps))

    @classmethod
    def params(cls, lanes: int) -> list[Any]:
        drawn = torch.Generator().manual_seed(0)
        shapes = ((5,), (3, 4)) * lanes
        return [
            torch.nn.Parameter(torch.randn(shape, generator=drawn))
            for shape in shapes[:lanes]
        ]

    def groups(self, ps: Any) -> Any:
        return ps

    def ready(self, ps: Ring) -> None:
        """What the user prepares."""

    def before(self, turn: int, ps: Ring) -> None:
        """What the user does before a step, gradients being there."""

    def around(self, turn: int) -> Any:
        """What the user's loop enters for a step."""
        return contextlib.nullcontext()

    def after(self) -> Any:
        """What a step leaves behind elsewhere."""

    @classmethod
    def undo(cls) -> None:
        """Put back what the user has exchanged."""

    def scale(self, p: Any, group: dict[str, Any]) -> Any:
        return 1.0

    def lane(self, p: Any, group: dict[str, Any]) -> None:
        p.add_(p.grad, alpha=-group["lr"] * self.scale(p, group))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.lane(p, group)


class Once(Scenario):
    """A number is made once a step, for all lanes."""

    def once(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        r = self.once()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * r)


class Lacking(Scenario):
    """Some lanes have no gradient now and then: `lacking` has their places by turn."""

    lacking: Any = ((), (), (2, 3), (2,), (4, 6))

    def before(self, turn: int, ps: Ring) -> None:
        for k in self.lacking[turn] if turn < len(self.lacking) else ():
            ps[k].grad = None


class FirstLacking(Scenario):
    """The first lane has no gradient now and then, once with some that follow it."""

    def before(self, turn: int, ps: Ring) -> None:
        if turn in (2, 4):
            ps[0].grad = None
        if turn == 3:
            for p in ps[:6]:
                p.grad = None


class SecondsLacking(Scenario):
    """Every second lane has no gradient from the third step on."""

    def before(self, turn: int, ps: Ring) -> None:
        if turn >= 2:
            for p in ps[1::2]:
                p.grad = None
