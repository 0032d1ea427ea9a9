"""Custom ops that formats need and torch lacks; a step can trace them.

A block has `size` neighbours of a contiguous tensor; the last one may have fewer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.library import Library, custom_op

from ..ir.blocks import count
from ..ir.tables import TABLES


@custom_op("fuseopt::index_like", mutates_args=())
def index_like(t: torch.Tensor) -> torch.Tensor:
    """Return the index of each element of a contiguous tensor: int32, of its shape.

    Raises RuntimeError for a tensor that is not contiguous.
    """
    if not t.is_contiguous():
        raise RuntimeError(f"fuseopt::index_like: strides {t.stride()} are given")
    numbers = torch.arange(t.numel(), dtype=torch.int32, device=t.device)
    return numbers.view(t.shape)


@index_like.register_fake
def _(t: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(t, dtype=torch.int32)


# ---------------------------------------------------------------- blocks


def _spread(t: torch.Tensor, shape: list[int], size: int) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return t.repeat_interleave(size)[:n].reshape(shape)


def _rows(x: torch.Tensor, size: int, filler: float) -> torch.Tensor:
    """Return a row for each block."""
    missing = count(x.numel(), size) * size - x.numel()
    flat = torch.nn.functional.pad(x.reshape(-1), (0, missing), value=filler)
    return flat.view(-1, size)


@custom_op("fuseopt::spread", mutates_args=())
def spread(t: torch.Tensor, shape: list[int], size: int) -> torch.Tensor:
    """Return for each element of a tensor of this shape the number of its block, of t
    [blocks].
    """
    return _spread(t, shape, size)


@custom_op("fuseopt::block_largest", mutates_args=())
def block_largest(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the largest number of each element's block, of the shape of x; NaN if the
    block has a NaN.
    """
    return _spread(_rows(x, size, -torch.inf).amax(1), list(x.shape), size)


@custom_op("fuseopt::block_least", mutates_args=())
def block_least(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return the least number of each element's block, of the shape of x; NaN if the
    block has a NaN.
    """
    return _spread(_rows(x, size, torch.inf).amin(1), list(x.shape), size)


@spread.register_fake
def _(t: torch.Tensor, shape: list[int], size: int) -> torch.Tensor:
    return t.new_empty(shape)


@block_largest.register_fake
def _(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(x)


@block_least.register_fake
def _(x: torch.Tensor, size: int) -> torch.Tensor:
    return torch.empty_like(x)


def _block_first_(t: torch.Tensor, x: torch.Tensor, size: int) -> torch.Tensor:
    return t.copy_(x.reshape(-1)[::size])


_LIBRARY: Any = Library("fuseopt", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("block_first_(Tensor(a!) t, Tensor x, int size) -> Tensor(a!)")
_LIBRARY.impl("block_first_", _block_first_, "CompositeExplicitAutograd")


def block_first_(t: torch.Tensor, x: torch.Tensor, size: int) -> None:
    """Write the first element of each block of x to t [blocks]."""
    torch.ops.fuseopt.block_first_(t, x, size)


# ---------------------------------------------------------------- tables


@custom_op("fuseopt::lookup", mutates_args=())
def lookup(code: torch.Tensor, part: torch.Tensor, table: int) -> torch.Tensor:
    """Return the value of each code in a part of a table: int32, int32 -> float32."""
    values = code.new_tensor(TABLES[table].values, dtype=torch.float32)
    return values[part.long(), code.long()]


@custom_op("fuseopt::search", mutates_args=())
def search(x: torch.Tensor, part: torch.Tensor, table: int) -> torch.Tensor:
    """Return the code of each number in a part of a table; 0 for NaN: float32, int32 ->
    int32.

    Raises RuntimeError for a part that the table lacks.
    """
    codes = torch.zeros(x.shape, dtype=torch.int32, device=x.device)
    for k, steps in enumerate(TABLES[table].steps):
        known = x.new_tensor(steps, dtype=torch.float32)
        found = torch.searchsorted(known, x.contiguous(), right=True, out_int32=True)
        codes = torch.where((part == k) & (x == x), found, codes)
    return codes


@lookup.register_fake
def _(code: torch.Tensor, part: torch.Tensor, table: int) -> torch.Tensor:
    return torch.empty_like(code, dtype=torch.float32)


@search.register_fake
def _(x: torch.Tensor, part: torch.Tensor, table: int) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.int32)
