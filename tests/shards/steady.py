"""Steady steps of DTensors, with a change among them, and which way each call goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from fuseopt.inputs.parts import PartGuard
from fuseopt.inputs.pending_gradients import PendingGradients
from fuseopt.isolate.quick import QuickSteps
from tests.shards import local
from tests.shards.steps import parameters, step_of

#: What a look in C found of a steady step.
SAME = 0
#: Calls after which a step is steady, and those that follow a change.
BEFORE, AFTER = 5, 4
Change = Callable[[Optimizer, DeviceMesh], object]


class Seen:
    """By call: what the looks in C found, and whether parameters got gradients.

    No single call of C repeats a step meanwhile (`test_single.py` has those).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[list[int], bool]] = []
        compare, put = PartGuard.compare, PendingGradients.put
        monkeypatch.setattr(QuickSteps, "learn", lambda *_: None)

        def compared(guard: PartGuard, *args: Any) -> Any:
            grads = compare(guard, *args)
            self.calls[-1][0].append(guard.found)
            return grads

        def given(own: PendingGradients) -> None:
            if own.grads is not None and self.calls:
                self.calls[-1] = self.calls[-1][0], True
            put(own)

        monkeypatch.setattr(PartGuard, "compare", compared)
        monkeypatch.setattr(PendingGradients, "put", given)


STEADY = [SAME], False


def at_the_end(replaced: bool) -> tuple[list[int], bool]:
    """What is seen of a later call. Lanes that were given other tensors in their state
    are compared from Python, and so are their gradients.
    """
    return [SAME], replaced


def give(params: Sequence[Any], seed: int) -> None:
    """Gradients of now, with the specs of the parameters, as FSDP makes them."""
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        part = torch.randn(local(p).shape, generator=generator)
        p.grad = DTensor(part, p._spec, requires_grad=False)


def params_of(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def adamw(params: list[Any]) -> Optimizer:
    return AdamW(params, lr=0.1)


def momentum(params: list[Any]) -> Optimizer:
    return SGD(params, lr=0.1, momentum=0.9)


def walk(
    way: str,
    mesh: DeviceMesh,
    change: Change = lambda o, m: None,
    make: Callable[[list[Any]], Optimizer] = adamw,
    seen: Seen | None = None,
    call: Callable[[Callable[[], Any], bool], None] = lambda step, _: step(),
) -> Optimizer:
    """Steps, and one before which something changes. `call(step, now)` does one, and
    knows when that is.
    """
    optimizer = make(parameters(mesh, 20))
    step = step_of(optimizer, way)
    for k in range(BEFORE + 1 + AFTER):
        give(params_of(optimizer), k)
        if k == BEFORE:
            change(optimizer, mesh)
        if way and seen is not None:
            seen.calls.append(([], False))
        call(step, k == BEFORE)
    return optimizer


def first(optimizer: Optimizer) -> Any:
    """A parameter that has elements here."""
    return next(p for p in params_of(optimizer) if local(p).numel())


def state_of(optimizer: Optimizer, name: str = "exp_avg") -> Any:
    return optimizer.state[first(optimizer)][name]


def another_spec(t: Any) -> Any:
    return dataclasses.replace(t._spec)


def swap_part(t: Any) -> None:
    t._local_tensor = t._local_tensor.clone()


def give_data(t: Any) -> None:
    t._local_tensor.data = t._local_tensor.data.clone()


def set_storage(t: Any) -> None:
    with torch.no_grad():
        t._local_tensor.set_(t._local_tensor.clone())


def swap_spec(t: Any) -> None:
    t._spec = another_spec(t)


def freeze(o: Optimizer, mesh: DeviceMesh) -> None:
    first(o).requires_grad_(False)


def move_all(o: Optimizer, mesh: DeviceMesh) -> None:
    for p in params_of(o):
        give_data(p)
        for x in o.state[p].values():
            if isinstance(x, DTensor):
                swap_part(x)
