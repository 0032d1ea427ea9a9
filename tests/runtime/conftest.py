"""Chains of products, where this machine has them."""

from __future__ import annotations

import pytest
import torch

from fuseopt.compiler import pipeline
from fuseopt.config import Config
from fuseopt.runtime.chains import Chains, batched_in_chain
from fuseopt.runtime.matrix_rows import same_bits


@pytest.fixture(scope="module")
def library() -> Chains:
    found = pipeline._chains(Config())
    if found is None:
        pytest.skip("this processor has no instructions for chains")
    return found


@pytest.fixture
def bits(library: Chains) -> None:
    """Chains have the bits of this machine's library, so that steps have them."""
    check_bits(library, torch.float32)


def check_bits(library: Chains, dtype: torch.dtype) -> None:
    """Skip where single products of this dtype add up in another order."""
    for n in (32, 40):
        x = torch.randn(8, n, 48, dtype=dtype)
        out = torch.empty(8, n, n, dtype=dtype)
        batched_in_chain(library, [x, x.mT], out, ())
        if not all(same_bits(a @ a.mT, b) for a, b in zip(x, out, strict=True)):
            pytest.skip("products of this machine have another order")
