"""What a compiled step notices of its optimizer's classes, state and groups."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import compat
from fuseopt.inputs.change import SAME, Change
from fuseopt.inputs.structure_guard import StructureGuard
from fuseopt.isolate.isolated import OptimizerCompiler
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards.library import HELPER
from fuseopt.tails.single_graph import SingleGraph
from tests.steps import same_bits


@pytest.fixture(scope="module", params=["Python", "C"])
def helper(request: pytest.FixtureRequest) -> ctypes.PyDLL | None:
    """The library of the guards, or None: Python compares."""
    if request.param == "Python":
        return None
    return ctypes.PyDLL(Builder().load(HELPER, None, False)._name)


def scaled(factor: float) -> Callable[..., torch.Tensor]:
    return lambda self, grad: grad * factor


def new_class() -> type[Any]:
    class Scaled(torch.optim.Optimizer):
        mixed: Any

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.5})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.add_(self.mixed(p.grad), alpha=-group["lr"])

    Scaled.mixed = scaled(1.0)
    return Scaled


def new_optimizer(kind: type[Any], n: int) -> Any:
    params = [torch.nn.Parameter(torch.full((3,), k + 1.0)) for k in range(n)]
    for k, p in enumerate(params):
        p.grad = torch.full((3,), 0.25 * (k + 1))
    return kind(params)


def test_nothing_holds_before_it_was_taken() -> None:
    optimizer, structure = new_optimizer(new_class(), 2), StructureGuard()
    assert not structure.known
    assert structure.compare(optimizer).change is Change.STRUCTURE
    structure.take(optimizer)
    assert structure.known
    assert structure.compare(optimizer) is SAME
    structure.forget()
    assert not structure.known
    assert structure.compare(optimizer).change is Change.STRUCTURE


@pytest.mark.parametrize(
    "change",
    [
        lambda x: setattr(type(x), "mixed", scaled(2.0)),
        lambda x: setattr(type(x).mixed, "__code__", (lambda self, g: g + 1).__code__),
        lambda x: setattr(type(x), "another", None),
        lambda x: delattr(type(x), "mixed"),
        lambda x: setattr(x, "__class__", new_class()),
        lambda x: setattr(x, "state", dict(x.state)),
        lambda x: setattr(x, "param_groups", [*x.param_groups]),
        lambda x: x.param_groups.append({"params": [], "lr": 1.0}),
    ],
)
def test_what_changes_does_not_hold(
    change: Callable[[Any], None], helper: ctypes.PyDLL | None
) -> None:
    kind = new_class()
    kind.mixed = lambda self, grad: grad
    optimizer, structure = new_optimizer(kind, 2), StructureGuard()
    structure.take(optimizer)
    for _ in range(3):
        assert structure.compare(optimizer, helper) is SAME
    change(optimizer)
    assert structure.compare(optimizer, helper).change is Change.STRUCTURE
    structure.take(optimizer)
    for _ in range(3):
        assert structure.compare(optimizer, helper) is SAME


def test_classes_are_compared_in_c(
    helper: ctypes.PyDLL | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second comparison on, Python goes over no attribute."""
    optimizer, structure = new_optimizer(new_class(), 2), StructureGuard()
    structure.take(optimizer)
    assert structure.compare(optimizer, helper) is SAME
    monkeypatch.setattr(structure, "_views", None)
    if helper is None:
        with pytest.raises(TypeError):
            structure.compare(optimizer, helper)
    else:
        assert structure.compare(optimizer, helper) is SAME


def test_the_dict_of_a_class() -> None:
    kind = new_class()
    found = compat.dict_of_class(kind)
    assert found is not None
    kind.number = 3
    assert found["number"] == 3, "the dict itself, no copy of it"
    assert compat.dict_of_class(kind) is found


@pytest.mark.parametrize(
    ("value", "holds"), [(2.0, True), (2, False), ([1.0], False), (None, False)]
)
def test_numbers_of_a_class_are_guarded_by_dynamo(
    value: Any, holds: bool, helper: ctypes.PyDLL | None
) -> None:
    kind = new_class()
    kind.number = 1.0
    optimizer, structure = new_optimizer(kind, 2), StructureGuard()
    structure.take(optimizer)
    assert structure.compare(optimizer, helper) is SAME
    kind.number = value
    for _ in range(3):
        assert (structure.compare(optimizer, helper) is SAME) is holds
    # what is no number is still found after numbers have changed
    kind.step = lambda self: None
    assert structure.compare(optimizer, helper) is not SAME


@pytest.mark.parametrize("n", [2, 20])
@pytest.mark.parametrize("way", ["step", "tail"])
def test_an_interrupt_while_old_code_is_dropped(
    monkeypatch: pytest.MonkeyPatch, way: str, n: int
) -> None:
    """The next call drops it."""
    kind = new_class()
    mine, theirs = new_optimizer(kind, n), new_optimizer(kind, n)
    if way == "step":
        step = fuseopt.compile(mine).step
        owner, name = OptimizerCompiler, "forget"
    else:
        step = fuseopt.tail(mine)
        owner, name = SingleGraph, "_release"

    def both() -> None:
        step()
        theirs.step()
        for p, q in zip(
            mine.param_groups[0]["params"],
            theirs.param_groups[0]["params"],
            strict=True,
        ):
            assert same_bits(p.detach(), q.detach())

    for _ in range(3):
        both()

    drop, calls = getattr(owner, name), []

    def interrupted_once(self: Any) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        drop(self)

    kind.mixed = scaled(3.0)
    monkeypatch.setattr(owner, name, interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        step()
    for _ in range(3):
        both()
    assert len(calls) == 2
