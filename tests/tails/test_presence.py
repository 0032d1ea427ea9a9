"""Tails whose gradients come and go: eager's bits, and nothing is made for a set."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import fuseopt
from fuseopt.tails.single_graph import MANY_SETS, SETS
from tests.papers import Lion
from tests.replicate.presence import Counts, some
from tests.steps import same_bits

MAKES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: AdamW(params, lr=0.01),
    "SGD": lambda params: SGD(params, lr=0.01, momentum=0.9),
    "Lion": lambda params: Lion(params, lr=0.01),
}


class Pair:
    """An optimizer in eager, with torch's clip, and the tail of another one."""

    def __init__(self, name: str, n: int, **options: Any) -> None:
        self.sides = []
        for _ in range(2):
            torch.manual_seed(0)
            params = [torch.nn.Parameter(torch.randn(3 + i % 4, 5)) for i in range(n)]
            self.sides.append((params, MAKES[name](params)))
        self.tail = fuseopt.tail(self.sides[1][1], clip_grad_norm=0.5, **options)
        self.turn = 0

    def step(self, missing: set[int]) -> None:
        self.turn += 1
        for params, _ in self.sides:
            drawn = torch.Generator().manual_seed(self.turn)
            for i, p in enumerate(params):
                grad = torch.randn(p.shape, generator=drawn)
                p.grad = None if i in missing else grad
        (theirs, plain), (mine, _) = self.sides
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        plain.step()
        outcome = self.tail()
        assert outcome.norm is not None
        assert same_bits(outcome.norm, norm)
        for i, (p, q) in enumerate(zip(theirs, mine, strict=True)):
            assert same_bits(p, q), (self.turn, i)
            if p.grad is not None and q.grad is not None:
                assert same_bits(p.grad, q.grad), (self.turn, i)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("SGD", 20),
        pytest.param("AdamW", 20, marks=pytest.mark.slow),
        pytest.param("Lion", 20, marks=pytest.mark.slow),
        pytest.param("AdamW", 6, marks=pytest.mark.slow),
    ],
)
def test_random_sets(name: str, n: int, made: Counts) -> None:
    pair, rng = Pair(name, n), random.Random(1)
    pair.step(set())
    for _ in range(2 * SETS + 6):
        pair.step(some(rng, n, 1))
    pair.step(set())
    before = made.planned
    for turn in range(40):
        pair.step(set() if turn % 7 == 0 else some(rng, n, 1))
    assert made.planned == before
    assert any(MANY_SETS in r.fallback for r in fuseopt.reports())


def test_sets_that_come_again_stay_in_one_graph() -> None:
    pair = Pair("SGD", 18)
    pair.step(set())
    for _ in range(3):
        for k in range(SETS):
            pair.step({k + 1})
    assert not any(MANY_SETS in r.fallback for r in fuseopt.reports())


def test_where_eager_is_an_error_each_set_has_a_graph() -> None:
    pair = Pair("SGD", 18, fallback="error")
    pair.step(set())
    for k in range(SETS + 3):
        pair.step({k + 1})
    assert not any(r.fallback for r in fuseopt.reports())
