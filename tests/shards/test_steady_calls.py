"""Around the steps of DTensors that are compared in C: modes, interrupts, versions,
references, and a torch that lacks something.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import BaseTorchFunctionMode

import fuseopt
from fuseopt import compat
from fuseopt.inputs.lane_guard import LaneGuard
from fuseopt.inputs.parts import UNASKED, DTensorRecord
from fuseopt.inputs.pending_gradients import PendingGradients
from fuseopt.isolate.quick import QuickSteps
from fuseopt.runtime.commit import Pending
from fuseopt.shards.local import LocalOptimizer
from tests.shards import assert_same, local
from tests.shards.steady import (
    BEFORE,
    SAME,
    STEADY,
    Seen,
    adamw,
    freeze,
    give,
    momentum,
    move_all,
    params_of,
    walk,
)
from tests.shards.steps import WAYS, parameters


def test_a_mode_is_asked(mesh: DeviceMesh, seen: Seen) -> None:
    def call(step: Callable[[], Any], now: bool) -> None:
        with BaseTorchFunctionMode() if now else nullcontext():
            step()

    want = walk("", mesh, make=momentum)
    got = walk(WAYS[0], mesh, make=momentum, seen=seen, call=call)
    assert_same(got, want)
    assert seen.calls[BEFORE][0] == [UNASKED]
    assert seen.calls[-1] == STEADY


PLACES: list[tuple[Any, str, bool]] = [
    (DTensorRecord, "compare", False),
    (LaneGuard, "compare", False),
    (Pending, "finish", False),
    (PendingGradients, "drop", True),
    (LocalOptimizer, "settle", True),
    (DTensorRecord, "count_up", True),
]


@pytest.mark.family(12)
@pytest.mark.parametrize("after", [False, True], ids=["before it", "after it"])
@pytest.mark.parametrize(
    ("kind", "name", "done"), PLACES, ids=lambda x: getattr(x, "__name__", x)
)
def test_an_interrupt(
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    name: str,
    done: bool,
    after: bool,
) -> None:
    """The step is done or not begun, and nothing is taken for known."""
    inner = getattr(kind, name)
    now: list[bool] = []

    def cut(*args: Any, **kwargs: Any) -> Any:
        if not now:
            return inner(*args, **kwargs)
        now.clear()
        if after:
            inner(*args, **kwargs)
        raise KeyboardInterrupt

    def call(step: Callable[[], Any], is_now: bool) -> None:
        now.extend([True] * is_now)
        with pytest.raises(KeyboardInterrupt) if is_now else nullcontext():
            step()

    done = done or (after and name == "finish")
    skip: Any = (lambda step, now: None if now else step()) if not done else None
    want = walk("", mesh, **({"call": skip} if skip else {}))
    monkeypatch.setattr(QuickSteps, "learn", lambda *_: None)
    monkeypatch.setattr(kind, name, cut)
    assert_same(walk(WAYS[0], mesh, call=call), want)


def test_versions_are_counted(mesh: DeviceMesh, seen: Seen) -> None:
    """Of what a steady step has changed, whole and part; of nothing else."""
    optimizer = walk(WAYS[0], mesh, freeze, seen=seen)
    params = params_of(optimizer)
    params[2].grad = None
    for _ in range(3):
        optimizer.step()
    before = [(p._version, local(p)._version) for p in params]
    seen.calls.append(([], False))
    optimizer.step()
    assert seen.calls[-1] == STEADY
    for k, (p, (whole, part)) in enumerate(zip(params, before, strict=True)):
        assert (p._version - whole, local(p)._version - part) == (
            (0, 0) if k == 2 else (1, 1)
        )


@pytest.mark.slow
def test_no_reference_is_lost_or_kept(mesh: DeviceMesh, seen: Seen) -> None:
    optimizer = walk(WAYS[0], mesh, seen=seen)
    params = params_of(optimizer)
    kept: list[Any] = [DTensor, torch.Tensor, vars(optimizer), optimizer.state]
    for p in params:
        kept += [p, local(p), p._spec, p.grad, local(p.grad), optimizer.state[p]]
        kept += list(optimizer.state[p].values())
    step = optimizer.step
    seen.calls.append(([], False))
    step()
    before = [*map(sys.getrefcount, kept)]
    for _ in range(1000):
        step()
    assert [*map(sys.getrefcount, kept)] == before
    assert set(seen.calls[-1][0]) == {SAME}
    assert not seen.calls[-1][1]


@pytest.mark.family(3)
@pytest.mark.parametrize(
    "missing",
    ["part_places", "version_functions", "gradient_functions"],
)
def test_where_torch_lacks_something(
    mesh: DeviceMesh, seen: Seen, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(compat, missing, lambda: None)
    want = walk("", mesh, move_all)
    assert_same(walk(WAYS[0], mesh, move_all, seen=seen), want)
    assert not any(found for found, _ in seen.calls)


def test_memory_is_not_read_where_it_must_not_be(mesh: DeviceMesh, seen: Seen) -> None:
    optimizer = adamw(parameters(mesh, 20))
    fuseopt.compile(optimizer, raw_fields=False)
    seen.calls.append(([], False))
    for k in range(BEFORE):
        give(params_of(optimizer), k)
        optimizer.step()
    assert not seen.calls[-1][0]


def test_what_is_read_of_a_dtensor_is_found_in_this_torch(mesh: DeviceMesh) -> None:
    places = compat.part_places()
    assert places is not None
    p: Any = parameters(mesh, 1)[0]
    words = [ctypes.c_uint64.from_address(id(p) + at).value for at in places]
    assert words == [id(p._local_tensor), id(p._spec)]
    assert compat.version_functions() is not None


def test_gradients_of_fsdp_are_taken_in_c(mesh: DeviceMesh, seen: Seen) -> None:
    """With a rate that moves at each call; what the collectives would give is not
    asked.
    """
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = fuseopt.compile(adamw([*model.parameters()]), fallback="error")
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(8):
        model(torch.randn(4, 16)).square().mean().backward()
        seen.calls.append(([], False))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert seen.calls[BEFORE:] == [STEADY] * 3
