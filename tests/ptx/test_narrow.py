"""State in 8 bits with the kernels of a GPU: the bits of the reference."""

from __future__ import annotations

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
