"""Tensors with a given layout, their rows, and numbers for them, for probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..ir.products import Layout
from .tables.host_numbers import SIZES

#: Writes the numbers of a round into an operand of a row: `(tensor, place among the
#: operands, row)`. For an operand that all rows share, the row is -1.
Fill = Callable[[torch.Tensor, int, int], None]


def padded_tensor(
    layout: Layout, dtype: torch.dtype, device: str, behind: int = 0
) -> torch.Tensor:
    """Return a new tensor with this layout; `behind` NaN follow it in its memory."""
    shape, stride, offset = layout
    last = sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    memory = torch.zeros(offset + last + 1 + behind, dtype=dtype, device=device)
    if behind:
        memory[offset + last + 1 :] = float("nan")
    return memory.as_strided(shape, stride, offset)


def rows_of(whole: torch.Tensor, n: int, dims: int) -> tuple[torch.Tensor, ...]:
    """Return the rows of a batched operand; batches (3 dims) are merged in it."""
    return torch.split(whole, len(whole) // n) if dims == 3 else whole.unbind(0)


def filled(single: torch.Tensor, fill: Fill, k: int, row: int) -> None:
    """Write numbers into the tensor of a row, through the CPU's memory."""
    if single.device.type == "cpu":
        fill(single, k, row)
        return
    host = torch.empty(single.shape, dtype=single.dtype)
    fill(host, k, row)
    single.copy_(host)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Are all bits equal, except those of NaN?"""
    kind = SIZES[one.dtype.itemsize]
    bits = one.contiguous().view(kind) == other.contiguous().view(kind)
    return bool((bits | (one.isnan() & other.isnan())).all())


class Numbers:
    """Normal numbers: a new window of a few random ones at each call."""

    def __init__(self, most: int) -> None:
        self.generator = torch.Generator().manual_seed(35)
        self.room = 4099
        self.at = 0
        count = most + self.room
        pool = torch.randn(count, generator=self.generator, dtype=torch.float64)
        self.normal = pool
        sizes = torch.randint(-6, 7, (count,), generator=self.generator)
        self.spread = torch.ldexp(pool, sizes)
        self.kinds = torch.randint(0, 160, (count,), generator=self.generator)

    def window(self, pool: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return numbers of a pool in a shape."""
        self.at = (self.at + 613) % self.room
        count = math.prod(shape)
        return pool[self.at : self.at + count].view(*shape)
