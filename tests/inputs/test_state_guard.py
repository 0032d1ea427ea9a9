"""What an optimizer holds besides its lanes: what of it changed, by both looks."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuseopt.inputs.change import SAME, Change
from fuseopt.inputs.lane_matcher import CallTensors, LaneMatcher
from fuseopt.inputs.lanes import Lanes
from fuseopt.inputs.state_guard import StateGuard
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards.library import HELPER
from tests.steps import make_params, set_grads


class Holds(torch.optim.SGD):
    """With attributes of several kinds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.table = {"a": 1.5, "b": (1, 2)}
        self.names = ["x", "y"]
        self.rate = 0.25


class Watched:
    """An optimizer, its lanes and the rest, after a first look at both."""

    def __init__(self) -> None:
        params = make_params([(3,)] * 6)
        self.opt = Holds(params)
        set_grads(params, params, 0)
        self.opt.step()
        self.rest = StateGuard()
        self.rest.compare(self.opt)
        self.lanes = LaneMatcher(Lanes(self.opt))
        self.helper = ctypes.PyDLL(Builder().load(HELPER, None, False)._name)
        self.compare()

    def compare(self) -> CallTensors:
        found = self.lanes.compare(self.opt, self.rest.struct, self.helper)
        assert found is not None
        return found


@pytest.fixture
def watched() -> Watched:
    made = Watched()
    assert made.compare().rest_same
    return made


def set_rate(opt: Any) -> None:
    opt.rate = 0.5


def set_lr(opt: Any) -> None:
    opt.param_groups[0]["lr"] = 0.2


def change_table(opt: Any) -> None:
    opt.table["a"] = 2.5


def replace_table(opt: Any) -> None:
    opt.table = dict(opt.table)


def add_attribute(opt: Any) -> None:
    opt.more = 1


def drop_attribute(opt: Any) -> None:
    del opt.rate


def rename_attribute(opt: Any) -> None:
    opt.other = opt.rate
    del opt.rate


def append_name(opt: Any) -> None:
    opt.names.append("z")


def swap_names(opt: Any) -> None:
    opt.names.reverse()


def replace_group(opt: Any) -> None:
    opt.param_groups[0] = dict(opt.param_groups[0])


def add_to_group(opt: Any) -> None:
    opt.param_groups[0]["more"] = 1


def reorder_group(opt: Any) -> None:
    group = opt.param_groups[0]
    group["lr"] = group.pop("lr")


CHANGES = [
    set_rate,
    set_lr,
    change_table,
    replace_table,
    add_attribute,
    drop_attribute,
    rename_attribute,
    append_name,
    swap_names,
    replace_group,
    add_to_group,
    reorder_group,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_the_helper_sees_each_change(
    watched: Watched, change: Callable[[Any], None]
) -> None:
    for _ in range(2):
        assert watched.compare().rest_same
    change(watched.opt)
    for _ in range(2):
        assert not watched.compare().rest_same
    watched.rest.compare(watched.opt)
    assert watched.compare().rest_same


@pytest.mark.parametrize("change", [set_rate, set_lr])
def test_numbers_move_and_all_else_counts(
    watched: Watched, change: Callable[[Any], None]
) -> None:
    rest, count = watched.rest, watched.rest.count
    change(watched.opt)
    rest.compare(watched.opt)
    place = "rate" if change is set_rate else (0, "lr")
    assert (rest.count, rest.moved) == (count, {place})
    append_name(watched.opt)
    rest.compare(watched.opt)
    assert rest.count == count + 1
    assert not rest.moved


def test_what_was_cut_off_is_looked_at_again(watched: Watched) -> None:
    watched.rest.forget()
    assert not watched.compare().rest_same


@pytest.mark.parametrize(
    "value", [collections.OrderedDict(a=1), ({"a": collections.OrderedDict()},)]
)
def test_other_containers_are_looked_at_from_python(
    watched: Watched, value: Any
) -> None:
    watched.opt.table = value
    watched.rest.compare(watched.opt)
    assert not watched.compare().rest_same


def in_tuple(opt: Any) -> None:
    opt.names[0] = 3


def in_depth(opt: Any) -> None:
    opt.table["b"][1]["c"].append(1)


@pytest.mark.parametrize("change", [in_tuple, in_depth], ids=lambda f: f.__name__)
def test_containers_at_any_depth_are_compared(
    watched: Watched, change: Callable[[Any], None]
) -> None:
    inner: list[Any] = [1]
    watched.opt.names = inner
    watched.opt.table = {"a": (inner, (inner,)), "b": ({}, {"c": []})}
    watched.rest.compare(watched.opt)
    assert watched.compare().rest_same
    count = watched.rest.count
    change(watched.opt)
    assert not watched.compare().rest_same
    found = watched.rest.compare(watched.opt)
    assert (found.change, watched.rest.count) == (Change.STRUCTURE, count + 1)
    assert watched.rest.compare(watched.opt) is SAME


def test_numbers_within_tuples_move(watched: Watched) -> None:
    watched.opt.betas = (0.9, 0.99)
    watched.rest.compare(watched.opt)
    watched.opt.betas = (0.8, 0.99)
    found = watched.rest.compare(watched.opt)
    assert found.change is Change.NUMBERS
    assert watched.rest.moved == {("betas", 0)}
    watched.opt.betas = (0.8, 0.99, 1.0)
    assert watched.rest.compare(watched.opt).change is Change.STRUCTURE
