"""State in 8 bits with the kernels of a GPU: the bits of the reference."""

from __future__ import annotations

import pytest
import torch

import fuseopt
from fuseopt import Storage
from tests.storage.reference import Params, Reference, same_bits

from .kernels import Log
from .test_storage import give_grads, momentum, there

STEPS = 3


def params_of() -> Params:
    """A part of a block, and whole ones."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((5, 8), (16, 16), (300,))
    return [torch.nn.Parameter(torch.randn(x, generator=generator)) for x in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["8bit/64", "8bit/256", "fp8-e4m3", "fp8-e5m2/128"])
def test_packed_state(ptx: Log, storage: str) -> None:
    theirs = params_of()
    ours = there(theirs)
    reference = Reference(momentum(theirs), storage)
    kept = Storage(storage, least=0)
    optimizer = fuseopt.compile(momentum(ours), storage=kept)
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
