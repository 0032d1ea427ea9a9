"""An error at any place of a step of DTensors leaves it whole: not begun, or done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import SGD, AdamW, Optimizer

import fuseopt
from tests.papers import LAMB, Lion
from tests.runtime.test_undo import AtFunction, raised_at_each
from tests.shards import local
from tests.shards.steps import give, parameters, step_of

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "AdamW": lambda ps: AdamW(ps, lr=0.1),
    "Lion": lambda ps: Lion(ps, lr=0.1),
    "LAMB": lambda ps: LAMB(ps, lr=0.1),
}


class Spread:
    """An optimizer of DTensors; `way`: "tail" too, "" is eager."""

    def __init__(self, mesh: DeviceMesh, kind: str, n: int, way: str) -> None:
        self.params: list[Any] = parameters(mesh, n)
        self.opt = KINDS[kind](self.params)
        self.drawn = torch.Generator().manual_seed(3)
        if way == "tail":
            self.step: Any = fuseopt.tail(self.opt, clip_grad_norm=1.0)
        else:
            self.step = step_of(self.opt, way)

    def set_grads(self) -> None:
        give(self.params, self.drawn)

    def held(self) -> list[Any]:
        state = (x for p in self.params for x in self.opt.state.get(p, {}).values())
        every = [local(x) for x in (*self.params, *state)]
        return [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in every]


class Clipped(Spread):
    """Torch's own lines beside a tail."""

    def __init__(self, mesh: DeviceMesh, kind: str, n: int) -> None:
        super().__init__(mesh, kind, n, "")
        step = self.step

        def lines() -> None:
            nn.utils.clip_grad_norm_(self.params, 1.0)
            step()

        self.step = lines


pytestmark = [pytest.mark.mishaps, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("kind", "n", "way", "every"),
    [
        ("AdamW", 6, "fuseopt.compile", 12),
        pytest.param("AdamW", 20, "fuseopt.compile", 1, marks=pytest.mark.slow),
        pytest.param("SGD", 20, "torch.compile", 2, marks=pytest.mark.slow),
        pytest.param("Lion", 6, "fuseopt.compile", 2, marks=pytest.mark.slow),
        pytest.param("LAMB", 6, "fuseopt.compile", 2, marks=pytest.mark.slow),
    ],
)
def test_a_step(mesh: DeviceMesh, kind: str, n: int, way: str, every: int) -> None:
    """At every function of fuseopt's that a steady step enters."""
    twins = Spread(mesh, kind, n, way), Spread(mesh, kind, n, "")
    assert raised_at_each(*twins, AtFunction, every) > 40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "n"), [("AdamW", 6), ("AdamW", 20), ("SGD", 6), ("Lion", 20)]
)
def test_a_tail(mesh: DeviceMesh, kind: str, n: int) -> None:
    twins = Spread(mesh, kind, n, "tail"), Clipped(mesh, kind, n)
    assert raised_at_each(*twins, AtFunction, 2) > 60
