"""Gradients that come and go: the rows of a bucket that lack theirs take no part."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

import fuseopt
from fuseopt.replicate.step import LedStep
from tests.papers import Lion
from tests.replicate.presence import Counts, some
from tests.steps import same_bits

N = 24
SHAPES: list[tuple[int, ...]] = [(4, 3), (5,), (7, 2), (3, 4, 2)]
BUILDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=0.01, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "Lion": lambda ps: Lion(ps, lr=0.01),
}


def loss_of(params: list[torch.nn.Parameter], missing: set[int], turn: int) -> Any:
    """A loss that some parameters are no part of."""
    drawn = torch.Generator().manual_seed(turn)
    return sum(
        (p * torch.randn(p.shape, generator=drawn)).sum()
        for i, p in enumerate(params)
        if i not in missing
    )


class Pair:
    """The same parameters, stepped after a backward and within it."""

    def __init__(self, build: Callable[[Any], Optimizer], buckets: Any) -> None:
        torch.manual_seed(0)
        self.theirs = [
            torch.nn.Parameter(torch.randn(SHAPES[i % len(SHAPES)])) for i in range(N)
        ]
        self.mine = [torch.nn.Parameter(p.detach().clone()) for p in self.theirs]
        self.plain = build(self.theirs)
        lists = [self.mine[i : i + buckets] for i in range(0, N, buckets)]
        self.handle = fuseopt.in_backward(self.mine, build, buckets=lists)
        self.turn = 0

    def step(self, missing: set[int]) -> None:
        self.turn += 1
        loss_of(self.theirs, missing, self.turn).backward()
        loss_of(self.mine, missing, self.turn).backward()
        self.plain.step()
        self.plain.zero_grad()
        for i, (p, q) in enumerate(zip(self.theirs, self.mine, strict=True)):
            assert same_bits(p, q), f"turn {self.turn}, lane {i}"
            assert q.grad is None
            a, b = self.plain.state.get(p, {}), self.handle.state.get(q, {})
            assert list(a) == list(b)
            for key, x in a.items():
                y = b[key]
                assert same_bits(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize(
    ("name", "buckets", "turns"),
    [
        ("SGD", 8, 30),
        pytest.param("SGD", N, 200, marks=pytest.mark.slow),
        pytest.param("AdamW", 8, 200, marks=pytest.mark.slow),
        pytest.param("AdamW", 3, 200, marks=pytest.mark.slow),
        pytest.param("Lion", 8, 200, marks=pytest.mark.slow),
    ],
)
def test_another_set_in_each_backward(
    name: str, buckets: int, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is extended or planned once each kind has been met; eager's bits."""
    made, rng = Counts(monkeypatch), random.Random(0)
    pair = Pair(BUILDS[name], buckets)
    # three lanes get their first gradient late
    late = {1, 9, 17}
    for _ in range(8):
        pair.step(some(rng, N) | late)
    for _ in range(turns // 2):  # with few lanes in a bucket, some kinds come late
        pair.step(some(rng, N))
    before = made.both()
    for _ in range(turns):
        pair.step(some(rng, N))
    assert made.both() == before


def test_no_memory_stands_in_for_gradients_that_are_there() -> None:
    """Stand-ins are made when a gradient is missing for the first time."""
    pair = Pair(BUILDS["SGD"], 8)
    steps = pair.handle._stepper._isolated.leader
    for missing, made in (set(), False), (set(), False), ({1, 2}, True):
        for _ in range(3):
            pair.step(missing)
        programs = [p for t in steps.traces for s in t.steps for p in s.programs]
        assert any(p._stand_ins for p in programs) is made


def test_steady_buckets_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket turns back to its own program; nothing is looked for."""
    pair, calls = Pair(BUILDS["SGD"], 6), []
    prepare = LedStep._prepare

    def counted(self: LedStep, args: Any) -> None:
        calls.append(1)
        prepare(self, args)

    monkeypatch.setattr(LedStep, "_prepare", counted)
    for _ in range(4):
        pair.step(set())
    assert calls
    calls.clear()
    for missing in (set(), {3}, {3, 8, 20}, set(), {0, 1, 2}):
        pair.step(missing)
    # once for each set of kinds that is met for the first time
    first = len(calls)
    for missing in (set(), {3, 8}, {0, 1, 2}, {20}, set(), {8, 20}):
        pair.step(missing)
    assert len(calls) == first
