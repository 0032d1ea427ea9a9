"""fuseopt's own ops on blocks of elements and tables -> nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...lowering.blocks import TABLED, lower_block
from .buffers import as_lane_number
from .dtypes import DTYPE_NAMES

if TYPE_CHECKING:
    from .pointwise import Pointwise

#: ATen name -> (op, the arguments that are operands, the argument that is an attribute)
OPS = {
    "fuseopt::spread": ("spread", ("t",), "size"),
    "fuseopt::block_largest": ("block_largest", ("x",), "size"),
    "fuseopt::block_least": ("block_least", ("x",), "size"),
    "fuseopt::block_first_": ("first", ("x",), "size"),
    "fuseopt::lookup": ("lookup", ("code", "part"), "table"),
    "fuseopt::search": ("search", ("x", "part"), "table"),
}


def record(
    recorder: Pointwise, name: str, bound: Mapping[str, Any], out: torch.Tensor
) -> bool:
    """Add the node of a call; False if it is none of them, or none that the IR has.

    Elements are counted as they lie, so that all tensors must be contiguous.
    """
    if name not in OPS or not out.numel():
        return False
    op, operands, attribute = OPS[name]
    tensors = [bound[x] for x in operands]
    by_block = op not in TABLED
    plain = all(
        t.dtype in DTYPE_NAMES
        and not t.is_neg()
        and (not by_block or (t.dim() and t.is_contiguous()))
        for t in (*tensors, out)
    )
    if not plain:
        return False
    if not by_block:  # of each element by itself
        tensors, out = [*map(as_lane_number, tensors)], as_lane_number(out)
    dtypes = tuple([DTYPE_NAMES[t.dtype] for t in tensors])
    body = lower_block(op, dtypes, bound[attribute])
    if body is None or body.writes[0][1] != DTYPE_NAMES[out.dtype]:
        return False
    recorder.add(body, tensors, out)
    return True
