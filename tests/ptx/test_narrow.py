"""State in 8 bits with the kernels of a GPU: the bits of the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fuseopt import Storage
from tests.storage.reference import Params

from .kernels import Log
from .test_storage import packed_steps


def params_of() -> Params:
    """A part of a block, and whole ones."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((5, 8), (16, 16), (300,))
    return [torch.nn.Parameter(torch.randn(x, generator=generator)) for x in sizes]


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["8bit/64", "8bit/256", "fp8-e4m3", "fp8-e5m2/128"])
def test_packed_state(ptx: Log, storage: str) -> None:
    packed_steps(ptx, params_of(), storage, Storage(storage, least=0))


@pytest.mark.slow
def test_blocks_of_two_sizes(ptx: Log) -> None:
    """Blocks that a warp folds in parts, and larger ones: one launch."""
    names = {"exp_avg": "8bit/64", "exp_avg_sq": "fp8-e4m3/512"}
    storage = [Storage(x, keys=key, least=0) for key, x in names.items()]
    packed_steps(ptx, params_of(), names, storage, averaged)


def averaged(params: Any) -> Any:
    """Two states of each parameter, and no root."""
    return Averaged(params, lr=0.1)


class Averaged(torch.optim.SGD):
    """Gradients and their squares, averaged."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state.update({x: torch.zeros_like(p) for x in KEYS})
            state["exp_avg"].lerp_(p.grad, 0.5)
            state["exp_avg_sq"].mul_(0.5).addcmul_(p.grad, p.grad)
            p.sub_(state["exp_avg"]).add_(state["exp_avg_sq"], alpha=0.25)


KEYS = ("exp_avg", "exp_avg_sq")
