"""Packed state and masters with the kernels of a GPU: the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

import fuseopt
from fuseopt.offload import MasterOptimizer
from tests.storage.reference import Params, Reference, params_of, same_bits

from .kernels import Log

STEPS = 5


def there(params: Params) -> Params:
    return [torch.nn.Parameter(p.detach().to("sim")) for p in params]


def give_grads(step: int, here: Params, there: Params) -> None:
    generator = torch.Generator().manual_seed(step)
    for p, q in zip(here, there, strict=True):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        q.grad = p.grad.to("sim")


def momentum(params: Any, lr: float = 0.1) -> Any:
    return optim.SGD(params, lr, momentum=0.5, foreach=True)


@pytest.mark.parametrize(
    "storage",
    [
        "bf16-stochastic",
        pytest.param("bf16", marks=pytest.mark.slow),
        pytest.param("fp16", marks=pytest.mark.slow),
        pytest.param("split", marks=pytest.mark.slow),
    ],
)
def test_packed_state(ptx: Log, storage: str) -> None:
    ptx.seed = 5
    packed_steps(ptx, params_of(6), storage, storage)


def packed_steps(
    ptx: Log, theirs: Params, name: Any, storage: Any, make: Any = momentum
) -> None:
    """Step beside the reference of the format `name`: equal bits, one launch each."""
    ours = there(theirs)
    reference = Reference(make(theirs), name)
    optimizer = fuseopt.compile(make(ours), storage=storage)
    for step in range(STEPS):
        give_grads(step, theirs, ours)
        reference.step()
        optimizer.step()
        for p, q in zip(theirs, ours, strict=True):
            assert same_bits(p.detach(), q.detach().cpu())
            for key, value in reference.content(p).items():
                assert same_bits(value, optimizer.state[q][key].cpu()), key
    assert not ptx.faults
    assert len(ptx.launches) == STEPS - 1  # the first makes state, in eager


def test_masters(ptx: Log) -> None:
    ptx.seed = 6
    theirs = params_of(6, dtype=torch.bfloat16)
    ours = there(theirs)
    # the same on the CPU, whose bits tests/offload compares with a loop by hand
    plain = MasterOptimizer(theirs, momentum)
    optimizer = MasterOptimizer(ours, momentum)
    for step in range(STEPS):
        give_grads(step, theirs, ours)
        plain.step()
        optimizer.step()
        for p, q in zip(theirs, ours, strict=True):
            assert same_bits(p.detach(), q.detach().cpu())
    assert not ptx.faults
    assert len(ptx.launches) == STEPS - 1
