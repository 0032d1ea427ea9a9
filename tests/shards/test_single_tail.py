"""Tails of DTensors that repeat the last call, and what changes between two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import fuseopt
from fuseopt.errors import CaptureError
from fuseopt.tails.led_parts import LedPartsTail
from fuseopt.tails.part_norm import PartNorm
from tests.shards import assert_same, local
from tests.shards.steady import adamw, give, momentum, params_of
from tests.shards.steps import WAYS, parameters
from tests.shards.test_single import AFTER, BEFORE, CHANGES, single, walk

__all__ = ["single"]

LIMIT = 0.5


def tail_of(optimizer: Optimizer, way: str) -> Callable[[], Any]:
    """A clip and a step: torch's lines, or a tail."""
    if way:
        return fuseopt.tail(optimizer, clip_grad_norm=LIMIT)

    def lines() -> None:
        torch.nn.utils.clip_grad_norm_(params_of(optimizer), LIMIT)
        optimizer.step()

    return lines


def shared(o: Optimizer, mesh: DeviceMesh) -> None:
    """Two parameters have one gradient, which is scaled twice."""
    first, second = params_of(o)[:2]
    grad = first.grad
    part = torch.ones(local(second.grad).shape)
    same = grad._spec.tensor_meta.shape == second.grad._spec.tensor_meta.shape
    second.grad = grad if same else DTensor(part, second._spec, requires_grad=False)


@pytest.mark.family(12)
@pytest.mark.filterwarnings("ignore:fuseopt")
@pytest.mark.parametrize("name", [*CHANGES, "shared"])
@pytest.mark.parametrize("make", [adamw, momentum])
def test_a_change(mesh: DeviceMesh, single: list[bool], make: Any, name: str) -> None:
    if "state" in name or name in ("held: move_all", "held: betas"):
        make = adamw  # it has this state
    threads = torch.get_num_threads()
    change = CHANGES.get(name, shared)
    try:
        want = walk("", mesh, change, make, single, tail_of)
        torch.set_num_threads(threads)
        got = walk(WAYS[0], mesh, change, make, single, tail_of)
    finally:
        torch.set_num_threads(threads)
    assert_same(got, want)


def repeated(mesh: DeviceMesh, calls: int = BEFORE) -> tuple[Optimizer, Any]:
    optimizer = adamw(parameters(mesh, 20))
    tail = tail_of(optimizer, WAYS[0])
    for k in range(calls):
        give(params_of(optimizer), k)
        tail()
    return optimizer, tail


def test_a_call_again(mesh: DeviceMesh, single: list[bool]) -> None:
    _, tail = repeated(mesh)
    single.clear()
    tail()
    assert single == [True]


def test_versions_are_counted(mesh: DeviceMesh, single: list[bool]) -> None:
    """Of parameters, their parts and gradients, as the clip and the step write them."""
    optimizer, tail = repeated(mesh)
    params = params_of(optimizer)
    single.clear()
    held = [t for p in params for t in (p, local(p), p.grad)]
    before = [t._version for t in held]
    tail()
    assert single == [True]
    assert [t._version for t in held] == [x + 1 for x in before]


def test_the_processes_are_asked_once(
    mesh: DeviceMesh, single: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a number changes between the collective and the step."""
    asked: list[Any] = []
    norm = PartNorm.__call__

    def counted(self: Any, parts: Any, divisor: Any) -> None:
        norm(self, parts, divisor)
        asked.append(self)
        if k == BEFORE:
            leader = tail._fused.parts.local.stand_in
            leader.param_groups[0]["lr"] = 0.25

    optimizer, tail = repeated(mesh)
    monkeypatch.setattr(PartNorm, "__call__", counted)
    for k in range(BEFORE, BEFORE + AFTER):
        give(params_of(optimizer), k)
        single.clear()
        tail()
        assert len(asked) == k - BEFORE + 1
        if k == BEFORE:
            assert single == [False]


def test_an_error_after_the_collective_has_the_clip(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes were asked: the clip is done, and the step runs in pieces."""
    optimizer, tail = repeated(mesh)
    other = adamw(parameters(mesh, 20))
    lines = tail_of(other, "")
    for k in range(BEFORE):
        give(params_of(other), k)
        lines()
    done = LedPartsTail._done

    def fails(self: Any, *args: Any) -> Any:
        call = args[1]

        def step(*_: Any) -> bool:
            raise CaptureError("as the test wants it")

        call.again = call.step = step
        return done(self, *args)

    monkeypatch.setattr(LedPartsTail, "_done", fails)
    for o, step in ((optimizer, tail), (other, lines)):
        give(params_of(o), BEFORE)
        step()
    assert_same(optimizer, other)
