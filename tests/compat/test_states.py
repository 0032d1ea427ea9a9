"""What a step does to a parameter whose state was removed, and begins anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Optimizer

import fuseopt
from tests.steps import same_bits

Step = Callable[[Optimizer], Callable[[], Any]]


def own(optimizer: Optimizer) -> Callable[[], Any]:
    fuseopt.compile(optimizer)
    return optimizer.step


def bound(optimizer: Optimizer) -> Callable[[], Any]:
    return torch.compile(optimizer.step, backend="fuseopt")


def within(optimizer: Optimizer) -> Callable[[], Any]:
    def step() -> None:
        optimizer.step()

    return torch.compile(step, backend="fuseopt")


def tail(optimizer: Optimizer) -> Callable[[], Any]:
    return fuseopt.tail(optimizer)


def built() -> tuple[list[Any], Optimizer]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n)) for n in (3, 5, 2, 7, 4)]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.1}]
    return params, SGD(groups, lr=0.1, momentum=0.9)


@pytest.mark.family(21)
@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize("way", [own, bound, within, tail])
def test_one_parameters_momentum_begins_anew_once(way: Step, place: int) -> None:
    """Dynamo guards the state of one parameter of each group."""
    (plain, eager), (params, compiled) = built(), built()
    step = way(compiled)
    for n in range(7):
        for p, q in zip(plain, params, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if n == 3:
            del eager.state[plain[place]], compiled.state[params[place]]
        if n == 5:
            # None stands for what is not there yet
            eager.state[plain[place]]["momentum_buffer"] = None
            compiled.state[params[place]]["momentum_buffer"] = None
        eager.step()
        step()
        assert all(map(same_bits, params, plain))
        for p, q in zip(plain, params, strict=True):
            one, other = eager.state[p], compiled.state[q]
            assert same_bits(one["momentum_buffer"], other["momentum_buffer"])
