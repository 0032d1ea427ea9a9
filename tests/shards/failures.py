"""A group in which one process does not do what the others do."""

from __future__ import annotations

import os
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fuseopt
from tests.shards import assert_same, difference, local
from tests.shards.training import OPTIMIZERS, backward, built, compiled, train, trained

WAY = "fuseopt.compile"


def no_gradients_here(kind: str, name: str, way: str = WAY) -> None:
    """One process has no gradients: nobody waits for it."""
    ends = []
    for how in ("", way):
        torch._dynamo.reset()
        _, optimizer = trained(kind, name, how, steps=2)
        for k in range(2):
            without = dist.get_rank() == k
            for p in optimizer.param_groups[0]["params"]:
                p.grad = None if without else torch.ones_like(p)
            optimizer.step()
        ends.append(optimizer)
    assert_same(ends[1], ends[0])


def torchs_clip_elsewhere(kind: str, name: str, way: str = WAY) -> None:
    """One process has torch's clip and eager's step, another has fuseopt's."""
    plain = nn.utils.clip_grad_norm_
    _, want = trained(kind, name, "", plain)
    ours, first = dist.get_rank() == 0, len(fuseopt.reports())
    clip = fuseopt.clip_grad_norm_ if ours else plain
    _, got = trained(kind, name, way if ours else "", clip)
    assert_same(got, want)
    assert (len(fuseopt.reports()) > first) == ours


def eager_elsewhere(kind: str, name: str, way: str = WAY) -> None:
    """The last process steps in eager: it is told what it is told by others like it."""
    torch._dynamo.reset()
    _, want = trained(kind, name, "")
    eager, first = dist.get_rank() == dist.get_world_size() - 1, len(fuseopt.reports())
    _, got = trained(kind, name, "" if eager else way)
    assert_same(got, want)
    reports = fuseopt.reports()[first:]
    assert bool(reports) != eager
    assert not any(r.fallback for r in reports), [str(r) for r in reports]


def raises_elsewhere(kind: str, name: str, at: str, way: str = WAY) -> NoReturn:
    """The last process raises before the collective of a clip, after so many steps, or
    has no gradients then (`at` is "none") and ends: others raise there.

    They have changed nothing, and the step of what they have works.
    """
    steps = 2 if at == "none" else int(at)
    m = built(kind)
    optimizer = compiled(OPTIMIZERS[name](m.parameters()), way)
    train(m, optimizer, steps, clip=fuseopt.clip_grad_norm_)
    backward(m, steps)
    params = [*m.parameters()]
    if dist.get_rank() == dist.get_world_size() - 1:
        if at == "none":
            m.zero_grad()
            assert fuseopt.clip_grad_norm_(params, 0.5) == 0.0
            ended()
        local(params[0].grad).untyped_storage().resize_(0)
        with pytest.raises(Exception, match="memory"):
            fuseopt.clip_grad_norm_(params, 0.5)
        ended()
    grads = [local(p.grad).clone() for p in params]
    with pytest.raises(RuntimeError, match=r"(?i)clos|reset|peer|timed out|connect"):
        fuseopt.clip_grad_norm_(params, 0.5)
    assert not difference([local(p.grad) for p in params], grads)
    before = [local(p).detach().clone() for p in params]
    optimizer.step()
    changed: list[Any] = [local(p).detach() for p in params]
    assert not any(map(torch.equal, changed, before))
    ended()


def ended() -> NoReturn:
    """End here and now: there is no group to leave."""
    print("done", flush=True)
    os._exit(0)
