"""What a watch over lanes sees: any object that is another one, but for gradients."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import fuseopt
from fuseopt import compat
from fuseopt.compat import fields
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards.helper import PROBE
from fuseopt.runtime.guards.probe import CHANGED, MOVED, Probe
from fuseopt.runtime.guards.watch import Watch
from fuseopt.shadow.lanes import KINDS
from tests.steps import make_params, set_grads


class Sub(Tensor):
    """A tensor of another class, with nothing else of its own."""


class Held:
    """Two groups of lanes, watched: the last lane of each has no state and no grad."""

    def __init__(self, helper: ctypes.PyDLL) -> None:
        self.lists = [[Parameter(torch.ones(3)) for _ in range(12)] for _ in range(2)]
        self.state: Any = collections.defaultdict(dict)
        for own in self.lists:
            for p in own[:-1]:
                p.grad = torch.ones(3)
                self.state[p] = {"step": torch.zeros(()), "mean": torch.zeros(3)}
        self.params = [p for own in self.lists for p in own]
        states = [self.state.get(p) for p in self.params]
        lists = [list(own) for own in self.lists]
        self.watch = Watch(helper, self.params, states, KINDS, lists, self.state)

    def look(self) -> list[Tensor] | None:
        return self.watch.look(self.lists, self.state)


@pytest.fixture(scope="module")
def helper() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(PROBE, None, False)._name)


@pytest.fixture(params=["all", "no getter", "no function", "neither"])
def held(
    request: pytest.FixtureRequest,
    helper: ctypes.PyDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> Held:
    """With and without what reads attributes faster than Python does."""
    if request.param in ("no getter", "neither"):
        monkeypatch.setattr(compat, "gradient_getter", lambda kinds: None)
    if request.param in ("no function", "neither"):
        monkeypatch.setattr(compat, "requires_grad_function", lambda tensors: None)
    return Held(helper)


def test_what_reads_attributes_is_found_in_this_torch() -> None:
    assert compat.gradient_getter(KINDS) is not None
    assert compat.requires_grad_function([torch.ones(1)]) is not None
    assert compat.gradient_getter((*KINDS, Own)) is None


class Own(Tensor):
    """Its gradient is what it says."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        return None


def test_gradients_are_those_of_now(held: Held) -> None:
    for _ in range(3):
        for p in held.params:
            if p.grad is not None:
                p.grad = torch.ones(3)
        found = held.look()
        assert found is not None
        assert [id(g) for g in found] == [id(p.grad) for p in held.params]


def replace_list(held: Held) -> None:
    held.lists[1] = tuple(held.lists[1])  # type: ignore[call-overload]


def add_to_list(held: Held) -> None:
    held.lists[0].append(Parameter(torch.ones(3)))


def swap_in_list(held: Held) -> None:
    own = held.lists[1]
    own[3], own[4] = own[4], own[3]


def add_list(held: Held) -> None:
    held.lists.append([])


def add_state(held: Held) -> None:
    held.state[held.params[11]] = {}


def replace_state(held: Held) -> None:
    held.state[held.params[5]] = dict(held.state[held.params[5]])


def reorder_state(held: Held) -> None:
    first = held.params[0]
    held.state[first] = held.state.pop(first)


def derive_state(held: Held) -> None:
    held.state = collections.OrderedDict(held.state)


def add_entry(held: Held) -> None:
    held.state[held.params[7]]["new"] = 1


def replace_entry(held: Held) -> None:
    held.state[held.params[7]]["mean"] = torch.zeros(3)


def rename_entry(held: Held) -> None:
    own = held.state[held.params[7]]
    own["other"] = own.pop("mean")


def freeze(held: Held) -> None:
    held.params[20].requires_grad_(False)


def drop_gradient(held: Held) -> None:
    held.params[2].grad = None


def add_gradient(held: Held) -> None:
    held.params[23].grad = torch.ones(3)


def derive_gradient(held: Held) -> None:
    held.params[2].grad = torch.ones(3).as_subclass(Sub)


CHANGES = [
    replace_list,
    add_to_list,
    swap_in_list,
    add_list,
    add_state,
    replace_state,
    reorder_state,
    derive_state,
    add_entry,
    replace_entry,
    rename_entry,
    freeze,
    drop_gradient,
    add_gradient,
    derive_gradient,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_each_change_is_seen(held: Held, change: Callable[[Held], None]) -> None:
    assert held.look() is not None
    change(held)
    assert held.look() is None


def test_a_function_that_is_missing_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fields, "_REQUIRES_GRAD", "no_such_function")
    fields._required.cache_clear()
    try:
        assert compat.requires_grad_function([torch.ones(1)]) is None
    finally:
        fields._required.cache_clear()


# ---------------------------------------------------------------- the probe


def test_tensors_that_are_held_are_compared_again(helper: ctypes.PyDLL) -> None:
    ts = [torch.zeros(3, 5) for _ in range(4)]
    probe = Probe(ts, helper)
    assert probe.look({}, {}, tuple(ts)) in (0, MOVED)
    probe.accept()
    holder = object()
    probe.hold(holder, [(1, 0), (3, 2)], 3)
    unused = torch.zeros(0)
    assert probe.holder is holder
    assert probe.look_again([ts[1], unused, ts[3]]) == 0
    # what is given now is another object
    assert probe.look_again([ts[1], unused, ts[3].clone()]) == MOVED
    assert probe.moved() == [3]
    assert probe.look_again([ts[1].double(), unused, ts[3]]) == CHANGED
    assert probe.look_again([ts[1], unused, ts[3]]) == 0
    # what is held is the same object, but moved or changed
    own = ts[2].detach()
    ts[2].data = torch.ones(3, 5)
    assert probe.look_again([ts[1], unused, ts[3]]) == MOVED
    assert probe.moved() == [2]
    ts[2].data = torch.ones(5, 3)
    assert probe.look_again([ts[1], unused, ts[3]]) == CHANGED
    ts[2].data = own
    assert probe.look_again([ts[1], unused, ts[3]]) == 0
    # one less than there were
    assert probe.look_again([ts[1], unused]) == CHANGED | MOVED
    # a look at all of them ends it
    assert probe.look({}, {}, tuple(ts)) == 0
    assert probe.holder is None


def test_nothing_is_held_that_was_not_compared(helper: ctypes.PyDLL) -> None:
    ts = [torch.zeros(3), torch.zeros(3)]
    probe = Probe(ts, helper)
    probe.look({}, {}, (ts[0],))
    probe.hold(object(), [(0, 0)], 1)
    assert probe.holder is None


def test_a_led_step_looks_at_its_gradients_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the watch knows is gathered once, not at each call."""
    params = make_params([(3, 4)] * 20)
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True))
    asked: list[int] = []
    look, again = Probe.look, Probe.look_again
    monkeypatch.setattr(
        Probe, "look", lambda self, *a: asked.append(self.n) or look(self, *a)
    )
    monkeypatch.setattr(
        Probe, "look_again", lambda self, a: asked.append(len(a)) or again(self, a)
    )
    for n in range(8):
        set_grads(params, params, n)
        opt.step()
        if n == 4:
            asked.clear()
    (size,) = set(asked)
    assert len(asked) == 3
    assert size < 30
