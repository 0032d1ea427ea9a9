"""Gradients that come and go on an accelerator: the captured graph stays as it is.

Lanes that are left out have no elements in the tables, and store their numbers nowhere.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from tests import ROOT
from tests.replicate.presence import Counts, some
from tests.steps import same_bits

pytest.importorskip("triton")

#: Lengths that no loop of eager leaves a rest of; the short ones share a program.
SHAPES: list[tuple[int, ...]] = [(64,), (4, 32), (2, 3, 64), (16,)]


class Momentum(Optimizer):
    """Nothing but elements."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad)
                p.sub_(state["mean"] * group["lr"])


class Counting(Momentum):
    """A counter of each parameter: a tensor on the device `where`, "" for its own."""

    where = ""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros((), device=self.where or p.device)
                    state["mean"] = torch.zeros_like(p)
                step, mean = state["step"], state["mean"]
                step.add_(1)
                mean.mul_(0.9).add_(p.grad)
                p.sub_(mean * (0.5**step) * group["lr"])


class CountingOnTheCpu(Counting):
    where = "cpu"


KINDS: list[Callable[[Any], Optimizer]] = [Momentum, Counting, CountingOnTheCpu]


class Both:
    """An optimizer in eager and one that is compiled, on a device."""

    def __init__(
        self, make: Callable[[Any], Optimizer], n: int, device: str, **options: Any
    ) -> None:
        drawn = torch.Generator().manual_seed(1)
        start = [torch.randn(SHAPES[i % 4], generator=drawn) for i in range(n)]
        self.sides = [
            [torch.nn.Parameter(t.clone().to(device)) for t in start] for _ in range(2)
        ]
        self.eager, self.optimizer = map(make, self.sides)
        fuseopt.compile(self.optimizer, eager_if_faster=False, **options)
        self.device, self.turn, self.n = device, 0, n

    def step(self, missing: set[int]) -> None:
        self.turn += 1
        drawn = torch.Generator().manual_seed(self.turn)
        for i, pair in enumerate(zip(*self.sides, strict=True)):
            grad = torch.randn(SHAPES[i % 4], generator=drawn)
            for p in pair:
                p.grad = None if i in missing else grad.to(self.device)
        self.eager.step()
        self.optimizer.step()
        for i, (p, q) in enumerate(zip(*self.sides, strict=True)):
            where = f"turn {self.turn}, lane {i}, missing: {i in missing}"
            assert same_bits(p.detach().cpu(), q.detach().cpu()), where
            mine, theirs = self.eager.state.get(p, {}), self.optimizer.state.get(q, {})
            assert mine.keys() == theirs.keys(), where
            for key, x in mine.items():
                assert same_bits(x.cpu(), theirs[key].cpu()), (where, key)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.family(3)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "launches"])
@pytest.mark.parametrize("make", KINDS)
def test_random_sets(sim: ModuleType, make: Any, graphs: bool, made: Counts) -> None:
    both, rng = Both(make, 20, "sim", cudagraphs=graphs), random.Random(1)
    for _ in range(8):
        both.step(some(rng, 20))
    both.step(set())
    both.step(set())
    before = made.extended
    for turn in range(25):
        both.step(set() if turn % 8 == 0 else some(rng, 20))
    assert made.extended == before


def in_the_interpreter() -> None:
    for make in KINDS:
        both, rng = Both(make, 18, "cpu", target="triton"), random.Random(3)
        for turn in range(12):
            both.step(set() if turn % 4 == 3 else some(rng, 18))


@pytest.mark.slow
def test_in_the_interpreter() -> None:
    """Triton's, which a process has from its start or not at all."""
    code = f"from {__name__} import in_the_interpreter; in_the_interpreter()"
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=250)
