"""A closure that a step calls before all else is called by itself; few lanes then lead.

Any other code that sees a closure is traced whole, as it is.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.isolate.closures import opening
from tests.steps import ELEVEN, differences, make, make_params, set_grads

SHAPES = [(3, 4), (5,)] * 9


class Pair:
    """An optimizer in eager and one that is compiled; each step is given a closure that
    sets gradients, and notes that it was called.
    """

    def __init__(self, make: Any) -> None:
        self.theirs, self.mine = make_params(SHAPES), make_params(SHAPES)
        self.eager, self.optimizer = make(self.theirs), make(self.mine)
        fuseopt.compile(self.optimizer)
        self.calls: list[bool] = []
        self.seed = 0

    def both(self, by_name: bool = False) -> None:
        self.seed += 1
        results = []
        sides = (self.eager, self.theirs), (self.optimizer, self.mine)
        for optimizer, params in sides:
            closure = self.closure(optimizer, params)
            with torch.no_grad():
                call = {"closure": closure} if by_name else {}
                results.append(optimizer.step(*([] if by_name else [closure]), **call))
        assert results == [self.seed + 0.5] * 2
        assert self.calls == [True] * 2
        self.calls.clear()
        assert differences(self.theirs, self.eager, self.mine, self.optimizer) == []

    def closure(self, optimizer: Any, params: Any) -> Any:
        def closure() -> float:
            self.calls.append(torch.is_grad_enabled())
            optimizer.zero_grad()
            set_grads(params, params, self.seed)
            return self.seed + 0.5

        return closure


@pytest.mark.family(10)
@pytest.mark.parametrize("name", ELEVEN)
def test_few_lanes_lead_a_step_with_a_closure(name: str) -> None:
    pair = Pair(lambda params: make(name, params))
    for k in range(4):
        pair.both(by_name=k % 2 == 1)
    reports = fuseopt.reports()
    assert {r.launches for r in reports} == {1}
    assert all("of 18 lanes" in r.traced or "of 36 lanes" in r.traced for r in reports)


def test_with_and_without_a_closure_is_one_compilation() -> None:
    pair = Pair(lambda params: make("AdamW", params))
    pair.both()
    for given in ((), (None,)):
        set_grads(pair.theirs, pair.mine, 7)
        pair.eager.step(*given)
        pair.optimizer.step(*given)
    pair.both()
    assert len(fuseopt.reports()) == 1


def test_an_error_of_a_closure_leaves_all_as_it_was() -> None:
    pair = Pair(lambda params: make("AdamW", params))
    pair.both()
    before = [p.detach().clone() for p in pair.mine]

    def closure() -> float:
        raise KeyError("data")

    with pytest.raises(KeyError, match="data"):
        pair.optimizer.step(closure)
    assert all(map(torch.equal, before, pair.mine))
    pair.both()


class Base(torch.optim.Optimizer):
    """Plain descent, written in other ways by those below."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def descend(self, scale: float = 1.0) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * scale)


class First(Base):
    @torch.no_grad()
    def step(self, closure=None):
        """The form that torch's own have."""
        loss: Any = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        return loss


class Reads(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend(1.0 if loss is None else 0.5)
        return loss


class Twice(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        if closure is not None:
            self.descend(0.25)
        return loss


class Last(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        return loss


class Forgets(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        if len(self.param_groups) > 1:
            return None
        return loss


class WithoutGradients(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            loss = closure()
        self.descend()
        return loss


class Empties(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        closure = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        return loss


class Looks(Base):
    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend(len(locals()))
        return loss


class Gradients:
    """What is not torch under its name."""

    enable_grad = staticmethod(torch.no_grad)


class Other(Base):
    @torch.no_grad()
    def step(self, closure=None, torch=Gradients):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.descend()
        return loss


def code_of(kind: type) -> Any:
    return inspect.unwrap(kind.step)


def test_the_form_is_known() -> None:
    assert opening(code_of(First)) == "closure"
    for name in ELEVEN:
        assert opening(code_of(getattr(torch.optim, name))) == "closure"


@pytest.mark.parametrize(
    "kind",
    [Reads, Twice, Last, Forgets, WithoutGradients, Empties, Looks, Other],
    ids=lambda kind: kind.__name__,
)
def test_what_is_another_form(kind: type) -> None:
    assert opening(code_of(kind)) == ""


@pytest.mark.family(5)
@pytest.mark.parametrize("kind", [First, Reads, Twice, Last, Forgets])
def test_either_has_the_bits_of_eager(kind: type) -> None:
    pair = Pair(kind)
    for _ in range(3):
        pair.both()


def wrapped(optimizer: Any) -> Any:
    """A step put in its place on the object, which takes whatever it is given."""
    plain = optimizer.step

    def counting(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs)

    optimizer.step = counting
    return optimizer


def test_a_function_without_names_opens_with_nothing() -> None:
    def of_anything(*args: Any, **kwargs: Any) -> None:
        pass

    def of_nothing() -> None:
        pass

    assert opening(of_anything) == opening(of_nothing) == ""


# what it wraps looks an optimizer's dict up by itself, of which a warning tells
@pytest.mark.filterwarnings("ignore:fuseopt. SGD.step runs in eager")
@pytest.mark.parametrize("by_name", [False, True])
def test_a_step_that_takes_anything(by_name: bool) -> None:
    pair = Pair(lambda params: wrapped(make("SGD", params)))
    for _ in range(3):
        pair.both(by_name)
