"""What a watch over lanes sees: any object that is another one, but for gradients."""

from __future__ import annotations

import collections
import ctypes
import operator
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

import fuseopt
from fuseopt import compat
from fuseopt.compat import fields
from fuseopt.inputs.keys import KINDS
from fuseopt.inputs.lane_guard import GuardIndexMap, LaneGuard
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards import library
from fuseopt.runtime.guards.library import HELPER
from fuseopt.runtime.guards.sharing import Moves
from fuseopt.runtime.guards.tensors import CHANGED, MOVED, TensorGuard, address
from fuseopt.runtime.tables.addresses import AddressPool, Positions
from tests.replicate.steady_twins import Count
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
        given = self.params, states, KINDS, lists, self.state
        self.watch = LaneGuard(helper, *given, library.ContainerRecord())

    def compare(self) -> list[Tensor] | None:
        return self.watch.compare({}, self.lists, self.state)


@pytest.fixture(scope="module")
def helper() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(HELPER, None, False)._name)


@pytest.fixture(params=["all", "no getter", "no function", "neither", "slow", "mode"])
def held(
    request: pytest.FixtureRequest,
    helper: ctypes.PyDLL,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Held]:
    """With and without what reads attributes faster than Python does."""
    if request.param in ("no getter", "neither"):
        monkeypatch.setattr(compat, "gradient_getter", lambda kinds: None)
    if request.param in ("no function", "neither"):
        monkeypatch.setattr(compat, "requires_grad_function", lambda tensors: None)
    if request.param == "slow":
        monkeypatch.setattr(compat, "gradient_functions", lambda: None)
        monkeypatch.setattr(compat, "dict_version", lambda: 0)
    with BaseTorchFunctionMode() if request.param == "mode" else nullcontext():
        yield Held(helper)


def test_what_reads_attributes_is_found_in_this_torch() -> None:
    assert compat.gradient_getter(KINDS) is not None
    assert compat.requires_grad_function([torch.ones(1)]) is not None
    assert compat.gradient_getter((*KINDS, Own)) is None
    assert compat.gradient_functions() is not None
    assert bool(compat.dict_version()) == (sys.version_info < (3, 13))


def test_what_reads_gradients_is_found_under_a_mode_too() -> None:
    """Once asked there, it was missing for the rest of the process."""
    with BaseTorchFunctionMode():
        assert fields._gradient_functions.__wrapped__() is not None


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
        found = held.compare()
        assert found is not None
        assert [id(g) for g in found] == [id(p.grad) for p in held.params]


def test_looks_take_and_leave_one_reference(held: Held) -> None:
    grads = [p.grad for p in held.params]
    before = [sys.getrefcount(g) for g in grads]
    for _ in range(50):
        found = held.compare()
        assert found is not None
    during = [sys.getrefcount(g) for g in grads]
    # of None there are others, which come and go
    own = [i for i, g in enumerate(grads) if g is not None]
    assert [during[i] - before[i] for i in own] == [1] * len(own)
    del found
    after = [sys.getrefcount(g) for g in grads]
    assert [after[i] for i in own] == [before[i] for i in own]


class Asked(TorchFunctionMode):
    """Counts how often it is asked of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients = 0

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.gradients += func == Tensor.grad.__get__  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def test_a_mode_is_asked_of_each_gradient(helper: ctypes.PyDLL) -> None:
    held = Held(helper)
    with Asked() as asked:
        assert held.compare() is not None
    assert asked.gradients == len(held.params)


def put_back(held: Held) -> None:
    """Two changes after which all is as it was."""
    own = held.state[held.params[7]]
    mean = own["mean"]
    own["mean"] = torch.zeros(3)
    own["mean"] = mean
    held.state[held.params[3]] = held.state[held.params[3]]


def test_what_was_put_back_is_the_same(held: Held) -> None:
    assert held.compare() is not None
    put_back(held)
    assert held.compare() is not None
    replace_entry(held)
    assert held.compare() is None
    assert held.compare() is None


WAYS: list[Callable[[dict[Any, Any]], object]] = [
    lambda d: d.update(mean=0),
    lambda d: d.pop("mean"),
    lambda d: d.popitem(),
    lambda d: d.clear(),
    lambda d: d.setdefault("new", 1),
    lambda d: d.__ior__({"mean": 0}),
    lambda d: d.__delitem__("mean"),
    lambda d: exec("mean = 0", {}, d),
    lambda d: operator.setitem(d, "mean", 0),
    lambda d: ctypes.pythonapi.PyDict_SetItemString(
        ctypes.py_object(d), b"mean", ctypes.py_object(0)
    ),
]


@pytest.mark.parametrize("change", WAYS, ids=range(len(WAYS)))
def test_each_way_to_change_a_dict_is_seen(
    held: Held, change: Callable[[dict[Any, Any]], object]
) -> None:
    assert held.compare() is not None
    change(held.state[held.params[7]])
    assert held.compare() is None


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
    assert held.compare() is not None
    change(held)
    assert held.compare() is None


def test_a_function_that_is_missing_is_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fields, "_REQUIRES_GRAD", "no_such_function")
    fields._required.cache_clear()
    try:
        assert compat.requires_grad_function([torch.ones(1)]) is None
    finally:
        fields._required.cache_clear()


# ---------------------------------------------------------------- tensors on the way


@pytest.fixture
def met(held: Held, helper: ctypes.PyDLL) -> Met:
    return Met(held, helper)


class Met:
    """A step of all tensors of watched lanes, and of two that belong to none."""

    def __init__(self, held: Held, helper: ctypes.PyDLL) -> None:
        self.held = held
        self.others = [torch.zeros(2), torch.zeros(4)]
        # first one of the others, then what lanes hold, the other one, gradients
        owned = [t for p in held.params for t in (p, *held.state.get(p, {}).values())]
        self.owned = owned
        n = 1 + len(owned)
        lanes = [p.grad is not None for p in held.params]
        self.at = [n + 1 + sum(lanes[:i]) if has else -1 for i, has in enumerate(lanes)]
        self.tensors = TensorGuard(self.all(), helper)
        self.tensors.compare({}, {}, tuple(self.all()))
        self.tensors.accept()
        self.places = array("q", [0, n])
        meeting = GuardIndexMap(array("q", self.at), array("q", [1, n]), self.places)
        held.watch.compare_with(self.tensors, meeting)

    def all(self) -> list[Tensor]:
        grads = [p.grad for p in self.held.params if p.grad is not None]
        return [self.others[0], *self.owned, self.others[1], *grads]

    def compare(self) -> int | None:
        """What both looks say; None where lanes hold other objects."""
        grads = self.held.compare()
        if grads is None:
            return None
        return self.tensors.compare_others(self.others, address(self.places), 2)


def test_tensors_are_compared_as_lanes_are(met: Met) -> None:
    assert met.held.watch.tensors is met.tensors
    for _ in range(3):
        assert met.compare() == 0
    # a gradient that is another tensor
    param = met.held.params[7]
    param.grad = torch.ones(3)
    assert met.compare() == MOVED
    assert met.tensors.moved() == [met.at[7]]
    met.tensors.accept()
    assert met.compare() == 0
    # what a lane holds, moved and back, changed and back
    mean = met.held.state[param]["mean"]
    own = mean.detach()
    mean.data = torch.ones(3)
    assert met.compare() == MOVED
    assert met.tensors.moved() == [
        next(i for i, t in enumerate(met.all()) if t is mean)
    ]
    mean.data = torch.ones(5, 3)
    assert met.compare() == CHANGED
    mean.data = own
    assert met.compare() == 0
    # one that belongs to no lane
    met.others[1] = met.others[1].clone()
    assert met.compare() == MOVED
    met.others[1] = met.others[1].double()
    assert met.compare() == CHANGED
    met.others.pop()
    assert met.compare() == CHANGED | MOVED


def test_lanes_that_hold_other_objects_are_not_compared(met: Met) -> None:
    met.held.state[met.held.params[3]]["mean"] = torch.zeros(3)
    assert met.compare() is None


def test_what_may_move_is_followed_in_both_looks(met: Met) -> None:
    every = met.all()
    pool = AddressPool(Positions(len(every), len(every), {}, []))
    pool.move(met.tensors.addresses)
    loose = [i in met.at or i == met.places[1] for i in range(len(every))]
    reach = [t.numel() * t.element_size() for t in every]
    met.tensors.let_move(Moves(loose, reach, [], [], pool))
    for p in met.held.params:
        if p.grad is not None:
            p.grad = torch.ones(3)
    met.others[1] = torch.zeros(4)
    assert met.compare() == 0
    assert pool.words.tolist() == [t.data_ptr() for t in met.all()]


def test_nothing_is_compared_again_that_was_not_before(met: Met) -> None:
    tensors = met.tensors
    tensors.compare({}, {}, (met.others[0],))
    meeting = GuardIndexMap(array("q", met.at), array("q"), met.places)
    met.held.watch.compare_with(tensors, meeting)
    assert met.held.watch.tensors is None
    met.others[0] = torch.zeros(7)
    assert met.held.compare() is not None


def test_a_gradient_that_the_step_does_not_have(met: Met) -> None:
    """It is compared with nothing."""
    meeting = GuardIndexMap(array("q", [-1] * len(met.at)), array("q"), met.places)
    met.tensors.compare({}, {}, tuple(met.all()))
    met.held.watch.compare_with(met.tensors, meeting)
    met.held.params[7].grad = torch.ones(5)[2:]
    assert met.compare() == 0


def test_a_led_step_is_compared_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A steady call compares lanes and tensors in one pass in C, and nothing twice."""
    params = make_params([(3, 4)] * 20)
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True))
    compared: list[int] = []
    compare, others = TensorGuard.compare, TensorGuard.compare_others
    monkeypatch.setattr(
        TensorGuard,
        "compare",
        lambda self, *a: compared.append(self.n) or compare(self, *a),
    )
    monkeypatch.setattr(
        TensorGuard,
        "compare_others",
        lambda self, *a: compared.append(len(a[0])) or others(self, *a),
    )
    with Count() as count:
        for n in range(8):
            set_grads(params, params, n)
            opt.step()
            if n == 4:
                assert compared, "the first calls compare by the guard's methods"
                compared.clear()
                before = count.done
    assert compared == []
    assert count.done == before + 3


class Lacking:
    """Lanes that may lack a gradient, but for the last one, and count their steps."""

    def __init__(self, helper: ctypes.PyDLL) -> None:
        self.params = [Parameter(torch.ones(3)) for _ in range(6)]
        self.lists = [list(self.params)]
        self.state: Any = {}
        for i, p in enumerate(self.params):
            p.grad = torch.ones(3)
            self.state[p] = {"n": 1000 + i, "mean": torch.zeros(3)}
        self.params[5].grad = None
        states = [self.state[p] for p in self.params]
        given = self.params, states, KINDS, [list(self.params)], self.state
        may_lack = bytes([1, 1, 1, 1, 1, 0])
        counted = [("n",)] * 6
        self.watch = LaneGuard(
            helper, *given, library.ContainerRecord(), may_lack, counted
        )

    def compare(self) -> list[Tensor] | None:
        return self.watch.compare({}, self.lists, self.state)


def test_gradients_that_may_be_missing(helper: ctypes.PyDLL) -> None:
    lanes = Lacking(helper)
    assert lanes.compare() == [p.grad for p in lanes.params]
    assert lanes.watch.present == bytes([1, 1, 1, 1, 1, 0])
    lanes.params[1].grad = lanes.params[4].grad = None
    grads = lanes.compare()
    assert grads is not None
    assert grads[1] is None
    assert lanes.watch.present == bytes([1, 0, 1, 1, 0, 0])
    lanes.params[1].grad = torch.ones(3)
    assert lanes.compare() is not None
    assert lanes.watch.present == bytes([1, 1, 1, 1, 0, 0])
    lanes.params[5].grad = torch.ones(3)
    assert lanes.compare() is None


def test_counters_that_move(helper: ctypes.PyDLL) -> None:
    lanes = Lacking(helper)
    assert lanes.compare() is not None
    assert lanes.watch.counters == [1000, 1001, 1002, 1003, 1004, 1005]
    lanes.state[lanes.params[2]]["n"] = 5
    assert lanes.compare() is not None
    assert lanes.watch.counters == [1000, 1001, 5, 1003, 1004, 1005]
    for other in (True, 5.0, None, torch.zeros(())):
        lanes.state[lanes.params[2]]["n"] = other
        assert lanes.compare() is None
    lanes.state[lanes.params[2]]["n"] = 2**80
    assert lanes.compare() is not None
    assert lanes.watch.counters[2] == 2**80


@pytest.mark.parametrize("what", ["shape", "dtype", "memory"])
def test_what_is_compared_for_a_missing_gradient(
    what: str, helper: ctypes.PyDLL
) -> None:
    """A stand-in of the step's, and then the gradient that comes."""
    lanes = Lacking(helper)
    lanes.params[1].grad = None
    stand_ins: list[Any] = [torch.zeros(3) for _ in range(5)] + [None]
    every = [
        *(
            (p.grad if p.grad is not None else s)
            for p, s in zip(lanes.params, stand_ins, strict=True)
        ),
    ][:5]
    guard = TensorGuard(every, helper)
    assert guard.compare({}, {}, tuple(every)) == 0
    nothing: array[int] = array("q")
    meeting = GuardIndexMap(
        array("q", [0, 1, 2, 3, 4, -1]), nothing, nothing, stand_ins
    )
    assert lanes.compare() is not None
    lanes.watch.compare_with(guard, meeting)
    assert lanes.watch.tensors is guard
    lanes.params[3].grad = None
    assert lanes.compare() is not None
    assert guard.compare_others([], address(nothing), 0) in (0, MOVED)
    came = {"shape": torch.ones(1, 3), "dtype": torch.ones(3), "memory": torch.ones(3)}
    if what == "dtype":
        # as a user may leave it: the parameter is exchanged with its gradient
        lanes.params[1].grad = torch.ones(3)
        lanes.params[1].grad.data = torch.ones(3, dtype=torch.float64)
    elif what == "shape":
        lanes.params[1].grad = torch.ones(3)
        lanes.params[1].grad.data = came[what]
    else:
        lanes.params[1].grad = came[what]
    assert lanes.compare() is not None
    verdict = guard.compare_others([], address(nothing), 0)
    assert bool(verdict & CHANGED) is (what != "memory")
