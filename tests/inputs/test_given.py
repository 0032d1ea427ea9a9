"""What containers held, and gradients that parameters are to have, asked in C."""

from __future__ import annotations

import collections
import ctypes
import sys
from array import array
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fuseopt.inputs.contents import Contents
from fuseopt.inputs.keys import KINDS
from fuseopt.inputs.lane_guard import GuardIndexMap, LaneGuard
from fuseopt.inputs.pending_gradients import PartMismatch, PendingGradients
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards import library
from fuseopt.runtime.guards.library import HELPER
from fuseopt.runtime.guards.tensors import TensorGuard


@pytest.fixture(scope="module")
def helper() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(HELPER, None, False)._name)


def test_containers_are_compared_in_one_call(helper: ctypes.PyDLL) -> None:
    one, two = object(), object()
    table: dict[str, Any] = {"a": one, "b": two}
    row = [one, two, one]
    also: Any = collections.defaultdict(list, c=two)
    known = Contents([table, also, row])
    assert known.same(helper)
    assert known.same(helper)
    assert known.struct is not None
    for change, back in (
        (lambda: table.update(a=two), lambda: table.update(a=one)),
        (lambda: table.update(c=one), lambda: table.pop("c")),
        (lambda: also.update(c=one), lambda: also.update(c=two)),
        (lambda: row.append(one), lambda: row.pop()),
        (lambda: row.reverse() or row.pop(0), lambda: row.insert(0, one)),
    ):
        change()
        assert not known.same()
        back()
        table["a"], table["b"] = table.pop("a"), table.pop("b")
        row[:] = [one, two, one]
        assert known.same()


def test_a_dict_that_was_put_back_is_compared(helper: ctypes.PyDLL) -> None:
    """Another version says no more than that it is to be asked."""
    tables = [{k: object() for k in "ab"} for _ in range(3)]
    known = Contents(tables)
    assert known.same(helper)
    assert known.same(helper)
    assert known.struct is not None
    for own in tables:
        assert known.same()
        before = own["a"]
        own["a"] = own["b"]
        assert not known.same()
        assert not known.same()
        own["a"] = before
        assert known.same()


class Lanes:
    """Five lanes, of which the last has a gradient of its own; the others are given
    theirs, and the one before has none.
    """

    def __init__(self, helper: ctypes.PyDLL) -> None:
        self.params = [Parameter(torch.ones(3)) for _ in range(5)]
        self.grads: list[Tensor | None] = [torch.ones(3) for _ in range(3)] + [None]
        self.own = self.params[-1].grad = torch.ones(3)
        self.given = PendingGradients(self.params[:4])
        self.given.grads = self.grads
        self.given.put()
        lanes = self.params, [None] * 5, KINDS, [self.params], {}
        self.guard = LaneGuard(helper, *lanes, library.ContainerRecord())
        every = [x for x in (*self.params, *self.grads, self.own) if x is not None]
        self.tensors = TensorGuard(every, helper)
        self.tensors.compare({}, {}, tuple(every))
        self.tensors.accept()
        self.given.drop()

    def meet(self) -> None:
        places = array("q", [5, 6, 7, -1, 8]), array("q", [0, 5]), array("q")
        self.guard.compare_with(self.tensors, GuardIndexMap(*places))

    def compare(self, grads: list[Tensor | None]) -> list[Any] | None:
        self.given.grads = grads
        return self.guard.compare({}, [self.params], {}, self.given)


def test_gradients_are_given(helper: ctypes.PyDLL) -> None:
    lanes = Lanes(helper)
    assert lanes.params[0].grad is None
    assert lanes.compare(lanes.grads) is None  # they would be compared with nothing
    lanes.meet()
    counts = [*map(sys.getrefcount, lanes.grads[:3])]
    for _ in range(20):
        found = lanes.compare(lanes.grads)
        assert found is not None
        assert [*map(id, found)] == [*map(id, [*lanes.grads, lanes.own])]
    del found
    assert [*map(sys.getrefcount, lanes.grads[:3])] == counts
    moved = [torch.ones(3), *lanes.grads[1:]]
    assert lanes.compare(moved) is not None


@pytest.mark.parametrize(
    "odd",
    [torch.ones(4), torch.ones(3).double(), torch.ones(6)[::2], None],
    ids=["size", "dtype", "strides", "none"],
)
def test_gradients_that_do_not_fit_are_not_taken(
    helper: ctypes.PyDLL, odd: Tensor | None
) -> None:
    lanes = Lanes(helper)
    lanes.meet()
    assert lanes.compare([odd, *lanes.grads[1:]]) is None
    assert lanes.compare(lanes.grads) is not None


def test_parameters_get_gradients_and_lose_them() -> None:
    params = [Parameter(torch.ones(3)) for _ in range(3)]
    given = PendingGradients(params)
    given.put()  # nothing to give
    grads = [torch.ones(3), None, torch.ones(3)]
    given.grads = [*grads]
    given.put()
    assert given.grads is None
    assert all(p.grad is g for p, g in zip(params, grads, strict=True))
    given.drop()
    assert not any(p.grad is not None for p in params)
    given.grads = [torch.ones(3), torch.ones(4), torch.ones(3)]
    with pytest.raises(PartMismatch, match="another size or dtype"):
        given.put()
    assert params[0].grad is not None
    given.drop()
    assert params[0].grad is None
    assert given.grads is None
