"""Packed state of random formats, sizes and layouts with the kernels of a GPU."""

from __future__ import annotations

import random

import pytest
import torch
from torch import optim

import fuseopt
from fuseopt.ir.blocks import SIZES
from fuseopt.storage.formats import BLOCKS
from tests.storage.reference import Params, Reference, same_bits

from .kernels import Log
from .test_storage import give_grads, there

FORMATS = [f"{kind}/{n}" for kind in BLOCKS for n in SIZES]
#: Without `split`, whose int16 may be -1: the machine takes it for fresh memory.
FORMATS += ["fp8-e4m3", "fp8-e5m2", "bf16", "bf16-stochastic", "fp16"]
#: One element, parts of a block, whole chunks and one more, 2-d.
SHAPES = ((1,), (2,), (3, 7), (63,), (65,), (1024,), (1025,), (4096,), (33, 130))
#: What a gradient has at one place. NaNs differ in their signs between processors.
ODD = (0.0, -0.0, 1e-40, -1e-42, 1e20, -1e12)


def momentum(params: Params) -> optim.Optimizer:
    return optim.SGD(params, 0.1, momentum=0.5, foreach=True)


def change(drawn: random.Random, theirs: Params, ours: Params) -> None:
    """Odd numbers in gradients, none at all, and odd addresses on the device."""
    for p, q in zip(theirs, ours, strict=True):
        assert p.grad is not None
        if drawn.random() < 0.3:
            place = tuple(drawn.randrange(n) for n in p.shape)
            p.grad[place] = drawn.choice(ODD)
        if drawn.random() < 0.2:
            p.grad.zero_()
        q.grad = p.grad.to("sim")
        if drawn.random() < 0.3:
            base = torch.empty(q.numel() + 1, device="sim")
            base[1:].copy_(q.grad.flatten())
            q.grad = base[1:].view(q.shape)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_formats(ptx: Log, seed: int) -> None:
    drawn = random.Random(seed)
    name = drawn.choice(FORMATS)
    ptx.seed = seed
    shapes = [drawn.choice([*SHAPES, (drawn.randrange(1, 9000),)]) for _ in range(5)]
    generator = torch.Generator().manual_seed(seed)
    theirs = [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in shapes]
    if drawn.random() < 0.4:
        for p in theirs:
            p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data
    ours = there(theirs)
    reference = Reference(momentum(theirs), name)
    packed = fuseopt.Storage(name, least=0)
    optimizer = fuseopt.compile(momentum(ours), storage=packed, fallback="error")
    for step in range(4):
        give_grads(step, theirs, ours)
        change(drawn, theirs, ours)
        reference.step()
        optimizer.step()
        for p, q in zip(theirs, ours, strict=True):
            assert same_bits(p.detach(), q.detach().cpu()), (name, p.shape, step)
            for key, value in reference.content(p).items():
                found = optimizer.state[q][key].cpu()
                assert same_bits(value, found), (name, p.shape, step, key)
    assert not ptx.faults
