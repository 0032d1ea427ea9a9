"""Lanes that count other steps, in integers of their state: what a step may do with
such a number, and what makes lanes that count differently other lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

import fuseopt
from tests.replicate.test_missing_gradients import Pair
from tests.versions import sets_no_attribute


class Counts(Optimizer):
    """A for-loop optimizer: `rate` says by what a step is scaled, from its number."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "most": 0})
        self.most = 0
        self.seen: list[int] = []
        self.rates = [1.0, 0.5, 0.25]

    def rate(self, state: dict[str, Any]) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"] = torch.zeros_like(p)
                state["step"] += 1
                state["m"].mul_(0.9).add_(p.grad)
                p.add_(state["m"], alpha=-group["lr"] * self.rate(state))


class Powers(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return 1 - 0.9 ** state["step"]


class Functions(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        t = state["step"]
        return math.sqrt(t) / (1 + t // 3) + float(t) * 0.01 + (t % 4)


class Keeps(Counts):
    """A number of a lane's own that is no integer, made of one that is."""

    def rate(self, state: dict[str, Any]) -> Any:
        state["rate"] = 1.0 / state["step"]
        return state["rate"]


class KeepsInteger(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        state["twice"] = 2 * state["step"] - 1
        return 1.0 / state["twice"]


class Fills(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        state["m"].add_(torch.full_like(state["m"], state["step"]))
        return 1.0


class Branches(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return 2.0 if state["step"] > 3 else 1.0


class Compares(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return 1.0 + (state["step"] > 3) * 0.5


class Least(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return min(state["step"], 4) * 0.1


class Looks(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return self.rates[state["step"] % 3]


class Repeats(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        made = 1.0
        for _ in range(state["step"]):
            made *= 0.9
        return made


class Truth(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return 2.0 if state["step"] % 2 else 1.0


class Gathers(Counts):
    """The largest of all counters, which lanes that come later see."""

    def rate(self, state: dict[str, Any]) -> Any:
        self.most = max(self.most, state["step"])
        return 1.0 + self.most


class Remembers(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        self.seen.append(state["step"])
        return 1.0


class Restarts(Counts):
    """A counter that begins anew, at a number that is the same for all."""

    def rate(self, state: dict[str, Any]) -> Any:
        made = 1.0 / (1 + state["step"])
        state["since"] = state.get("since", 0) + 1
        return made * state["since"]


class Texts(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        return float(len(str(state["step"])))


class Last(Counts):
    """The count before this one, stored as it is."""

    def rate(self, state: dict[str, Any]) -> Any:
        last = state.get("now", 0)
        state["now"] = state["step"]
        state["last"] = last
        return 1.0 / (1 + state["now"])


class Fibonacci(Counts):
    def rate(self, state: dict[str, Any]) -> Any:
        if "a" not in state:
            state["a"], state["b"] = 1, 1
        state["a"], state["b"] = state["b"], state["a"] + state["b"]
        return 1.0 / state["b"]


class Turns(Counts):
    """Three integers that change places, by one name and by another."""

    def rate(self, state: dict[str, Any]) -> Any:
        if "a" not in state:
            state["a"], state["b"], state["c"] = state["step"], 2, 301
        a = state["a"]
        state["a"], state["b"] = state["b"], state["c"]
        state["c"] = a
        return 1.0 / state["b"]


class Packs(Counts):
    """Integers of a lane in containers of its state."""

    def rate(self, state: dict[str, Any]) -> Any:
        state["pair"] = state["step"], [state["step"], {"n": state["step"]}]
        return 1.0 / state["pair"][0]


class Tells(Counts):
    """An integer of one lane where all lanes see it."""

    def rate(self, state: dict[str, Any]) -> Any:
        self.most = state["step"]
        return 1.0 / self.most


class Larger(Counts):
    """The larger of two numbers of two types."""

    def rate(self, state: dict[str, Any]) -> Any:
        state["top"] = max(state["step"], 2.5)
        state["low"] = min(0.5 * state["step"], 1)
        return 1.0 / state["top"] + state["low"]


LED = [Powers, Functions, KeepsInteger, Fills, Last, Fibonacci, Turns]
EVERY = [
    *LED,
    *(Keeps, Branches, Compares, Least, Looks, Repeats, Truth),
    pytest.param(Gathers, marks=sets_no_attribute),
    *(Remembers, Restarts, Texts, Packs, Larger),
    pytest.param(Tells, marks=sets_no_attribute),
]


@pytest.mark.family(9)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("kind", EVERY)
def test_bits_of_eager(kind: Callable[[Any], Optimizer]) -> None:
    pair = Pair(kind, 18)
    for _ in range(7):
        pair.random_step()
        pair.check()
        a, b = vars(pair.plain), vars(pair.opt)
        assert (a["most"], a["seen"]) == (b["most"], b["seen"])
    if kind in LED:
        assert all("they stand for" in r.traced for r in fuseopt.reports())
        assert len(fuseopt.reports()) <= 3


def test_a_counter_that_the_user_sets() -> None:
    pair = Pair(Powers, 18)
    for _ in range(4):
        pair.random_step()
    for opt, params in ((pair.plain, pair.theirs), (pair.opt, pair.mine)):
        for i, p in enumerate(params[::3]):
            if p in opt.state:
                opt.state[p]["step"] = -7 * i
    told = len(fuseopt.reports())
    for _ in range(3):
        pair.random_step()
        pair.check()
    assert len(fuseopt.reports()) == told


@pytest.mark.family(3)
@pytest.mark.parametrize("other", [3.0, True, torch.tensor(3.0)])
def test_a_counter_of_another_type(other: Any) -> None:
    """Equal numbers of other types are others."""
    pair = Pair(Powers, 18)
    for _ in range(4):
        pair.random_step(0.8)
    for opt, params in ((pair.plain, pair.theirs), (pair.opt, pair.mine)):
        value = other.clone() if isinstance(other, Tensor) else other
        opt.state[params[2]]["step"] = value
    for _ in range(3):
        pair.random_step(0.8)
        pair.check()
