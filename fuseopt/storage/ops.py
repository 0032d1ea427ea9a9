"""Ops that formats need and torch lacks, as custom ops, which a step can trace."""

from __future__ import annotations

import torch


@torch.library.custom_op("fuseopt::index_like", mutates_args=())
def index_like(t: torch.Tensor) -> torch.Tensor:
    """The number of each element of a contiguous tensor: int32, of its shape.

    Raises RuntimeError for a tensor that is not contiguous.
    """
    if not t.is_contiguous():
        raise RuntimeError(f"fuseopt::index_like: strides {t.stride()} are given")
    numbers = torch.arange(t.numel(), dtype=torch.int32, device=t.device)
    return numbers.view(t.shape)


@index_like.register_fake
def _(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, dtype=torch.int32)
