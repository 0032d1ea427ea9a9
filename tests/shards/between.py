"""What users do between two steps of a model that is spread over processes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import fuseopt
from tests.shards import assert_same
from tests.shards.training import OPTIMIZERS, backward, built, compiled

STEPS = 4
Event = Callable[[nn.Module, Optimizer, int], None]


def nothing(m: nn.Module, optimizer: Optimizer, k: int) -> None:
    """Only steps."""


def no_gradients_of_two(m: nn.Module, optimizer: Optimizer, k: int) -> None:
    """The same two in all processes."""
    if k in (1, 3):
        for p in [*m.parameters()][1:3]:
            p.grad = None


def a_group_is_added(m: nn.Module, optimizer: Optimizer, k: int) -> None:
    if k == 1:
        last = optimizer.param_groups[0]["params"].pop()
        optimizer.add_param_group({"params": [last], "lr": 0.5})


def reloaded(m: nn.Module, optimizer: Optimizer, k: int) -> None:
    if k == 2:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def one_raises(m: nn.Module, optimizer: Optimizer, k: int) -> None:
    """The last process steps with a rate that is none, and goes on after the error."""
    if k == 2 and dist.get_rank() == dist.get_world_size() - 1:
        group = optimizer.param_groups[0]
        rate, group["lr"] = group["lr"], "x"
        with contextlib.suppress(Exception):
            optimizer.step()
        group["lr"] = rate


EVENTS: dict[str, Event] = {
    x.__name__: x
    for x in (nothing, no_gradients_of_two, a_group_is_added, reloaded, one_raises)
}


def between(
    kind: str, name: str, event: str, way: str = "fuseopt.compile", lanes: str = "6"
) -> None:
    """Both runs clip and step; `way`: "tail" too. Bits of torch's own lines."""
    ends: list[Any] = []
    for how in ("", way):
        torch._dynamo.reset()
        m = built(kind, int(lanes))
        optimizer = OPTIMIZERS[name](m.parameters())
        step: Any = None
        if how == "tail":
            step = fuseopt.tail(optimizer, clip_grad_norm=1.0)
        else:
            compiled(optimizer, how)
        for k in range(STEPS):
            backward(m, k)
            EVENTS[event](m, optimizer, k)
            if step is None:
                clip = fuseopt.clip_grad_norm_ if how else nn.utils.clip_grad_norm_
                clip([*m.parameters()], 1.0)
                optimizer.step()
            else:
                step()
            optimizer.zero_grad()
        ends.append(optimizer)
    assert_same(ends[1], ends[0])
