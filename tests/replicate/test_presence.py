"""Gradients that are missing: the lanes are left out of a program that has them all.

Another set of gradients in each call: nothing is traced, extended, scheduled or built.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer, RMSprop

import fuseopt
from tests.papers import LAMB, Lion
from tests.replicate.presence import Counts, some
from tests.steps import same_bits

SHAPES: list[tuple[int, ...]] = [(4, 3), (5,), (7, 2), (3, 4, 2)]
#: Of these, lanes of one element are of other kinds.
ALL_SHAPES = [*SHAPES, (1,), ()]


class Counted(Optimizer):
    """Python's integers in the state; each lane's is its own."""

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
                    state["n"], state["last"] = 0, 0
                    state["m"] = torch.zeros_like(p)
                state["last"] = state["n"]
                state["n"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.sub_(state["m"], alpha=group["lr"] / state["n"] ** 0.5)


class WritesGradients(Counted):
    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.add_(p, alpha=0.1)
                    p.sub_(p.grad, alpha=group["lr"])


class DecaysAll(Counted):
    """Parameters without a gradient take part as well, in another way."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


MAKES: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda ps: AdamW(ps, lr=0.01),
    "AdamW, for-loop": lambda ps: AdamW(ps, lr=0.01, foreach=False),
    "SGD": lambda ps: SGD(ps, lr=0.01, momentum=0.9),
    "RMSprop": lambda ps: RMSprop(ps, lr=0.01),
    "LAMB": lambda ps: LAMB(ps, lr=0.01),
    "Lion": lambda ps: Lion(ps, lr=0.01),
    "Counted": Counted,
    "WritesGradients": WritesGradients,
    "DecaysAll": DecaysAll,
}


class Pair:
    """Two optimizers that are alike, the second one compiled. `tail`: behind a clip
    by the total norm, in a tail.
    """

    def __init__(
        self,
        name: str,
        n: int,
        of: list[tuple[int, ...]] = SHAPES,
        tail: bool = False,
    ) -> None:
        self.sides = []
        self.calls: list[Callable[[], Any]] = []
        for compiled in (False, True):
            torch.manual_seed(0)
            shapes = [of[i % len(of)] for i in range(n)]
            params = [torch.nn.Parameter(torch.randn(x)) for x in shapes]
            opt = MAKES[name](params)
            self.sides.append((params, opt))
            if compiled:
                fuseopt.compile(opt, eager_if_faster=False)
            one_tail = fuseopt.tail(opt, clip_grad_norm=1.0) if compiled else None

            def clipped(params: Any = params, opt: Any = opt) -> None:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
                opt.step()

            self.calls.append((one_tail or clipped) if tail else opt.step)
        self.turn = 0

    def give(self, missing: set[int]) -> None:
        for params, _ in self.sides:
            drawn = torch.Generator().manual_seed(self.turn)
            for i, p in enumerate(params):
                grad = torch.randn(p.shape, generator=drawn)
                p.grad = None if i in missing else grad

    def step(self, missing: set[int]) -> None:
        """One step of both; compares bits, state and versions."""
        self.turn += 1
        self.give(missing)
        (theirs, plain), (mine, opt) = self.sides
        before = [[p._version for p in params] for params, _ in self.sides]
        for call in self.calls:
            call()
        for i, (p, q) in enumerate(zip(theirs, mine, strict=True)):
            where = f"turn {self.turn}, lane {i}, missing: {i in missing}"
            assert same_bits(p, q), where
            counted = p._version > before[0][i], q._version > before[1][i]
            assert counted[0] == counted[1], where
            if p.grad is not None and q.grad is not None:
                assert same_bits(p.grad, q.grad), where
            a, b = plain.state.get(p, {}), opt.state.get(q, {})
            assert list(a) == list(b), where
            for key, x in a.items():
                y = b[key]
                assert type(x) is type(y), where
                assert same_bits(x, y) if isinstance(x, torch.Tensor) else x == y, where


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("SGD", 20),
        ("Counted", 20),
        pytest.param("AdamW", 20, marks=pytest.mark.slow),
        pytest.param("AdamW, for-loop", 20, marks=pytest.mark.slow),
        pytest.param("RMSprop", 20, marks=pytest.mark.slow),
        pytest.param("Lion", 20, marks=pytest.mark.slow),
        pytest.param("WritesGradients", 20, marks=pytest.mark.slow),
        # its kinds are as many as shapes
        pytest.param("LAMB", 40, marks=pytest.mark.slow),
    ],
)
def test_random_sets(name: str, n: int, made: Counts) -> None:
    """Bits of eager, and nothing made anew once each kind of lanes was there."""
    pair, rng = Pair(name, n), random.Random(1)
    for _ in range(9):
        pair.step(some(rng, n))
    for missing in (set(), set(), some(rng, n), set()):
        pair.step(missing)
    before = made.both()
    for turn in range(50):
        pair.step(set() if turn % 9 == 0 else some(rng, n))
    assert made.both() == before


@pytest.mark.slow
@pytest.mark.parametrize("tail", [False, True], ids=["step", "tail"])
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop", "LAMB", "Lion"])
def test_500_random_sets(name: str, tail: bool, made: Counts) -> None:
    pair, rng = Pair(name, 40, tail=tail), random.Random(2)
    for _ in range(12):
        pair.step(some(rng, 40))
    before = made.both()
    for _ in range(500):
        pair.step(some(rng, 40))
    assert made.both() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Counted"])
def test_sets_that_lack_whole_kinds(name: str) -> None:
    pair, rng = Pair(name, 18, ALL_SHAPES), random.Random(6)
    for _ in range(40):
        pair.step(some(rng, 18))


@pytest.mark.slow
def test_a_step_that_writes_what_has_no_gradient() -> None:
    """Each set has a program, as rows of two models would write one tensor."""
    pair, rng = Pair("DecaysAll", 20), random.Random(1)
    for _ in range(20):
        pair.step(some(rng, 20))


@pytest.mark.slow
def test_state_that_comes_late() -> None:
    """The first gradient of a parameter comes in call 12; of another one in call 20."""
    pair, rng = Pair("SGD", 18), random.Random(3)
    for turn in range(26):
        late = {4} if turn < 12 else set()
        pair.step(some(rng, 18) | late | ({7} if turn < 20 else set()))


def test_gradients_that_lie_otherwise(made: Counts) -> None:
    """Turned ones, and turned parameters, which are missing now and then."""
    pair, rng = Pair("AdamW", 18), random.Random(7)
    give = pair.give

    def turned(missing: set[int]) -> None:
        give(missing)
        for params, _ in pair.sides:
            for p in params[::4]:
                if p.grad is not None:
                    p.grad = p.grad.t().clone(memory_format=torch.contiguous_format).t()

    for params, _ in pair.sides:
        for p in params[2::4]:
            p.data = p.data.t().clone(memory_format=torch.contiguous_format).t()
    pair.give = turned  # type: ignore[method-assign]
    for _ in range(12):
        pair.step(some(rng, 18))
    pair.step(set())
    before = made.both()
    for _ in range(20):
        pair.step(some(rng, 18) - {0, 4, 2, 6})
    assert made.both() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdamW", "Counted"])
def test_what_is_left_out_may_change(name: str) -> None:
    """Memory, state, `requires_grad` and gradients of lanes that take no part."""
    pair, rng = Pair(name, 18), random.Random(4)
    for turn in range(24):
        missing = some(rng, 18) | {2, 5, 9}
        for params, opt in pair.sides:
            if turn == 8:
                params[2].data = params[2].data.clone()
            if turn == 10:
                opt.state.pop(params[5], None)
            if turn == 12:
                params[9].requires_grad_(False)
            if turn == 14 and "m" in opt.state.get(params[2], {}):
                opt.state[params[2]]["m"] = torch.ones_like(params[2])
            if turn == 16:
                params[9].requires_grad_(True)
        pair.step(missing if turn < 18 else missing - {2, 5, 9})


@pytest.mark.slow
def test_an_interrupt_between_two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows are told to take part, or not: the next call tells all of them."""
    from fuseopt.runtime.cpp.table import CppTable

    pair, rng = Pair("AdamW", 18), random.Random(5)
    for _ in range(12):
        pair.step(some(rng, 18))
    keep = CppTable.keep

    def interrupted(*args: Any) -> None:
        keep(*args)
        raise KeyboardInterrupt

    pair.give({1, 2})
    with monkeypatch.context() as patched:
        patched.setattr(CppTable, "keep", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.sides[1][1].step()
    for _ in range(6):
        pair.step(some(rng, 18))
