"""Copy rows that lie apart into adjacent memory, in one call of C."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence

import torch

from ..ir.graph import DTYPE_BYTES, Buffer
from ..ir.products import ADDRESSED, COPIED, Operand
from .tables.host_numbers import CPU
from .tables.words import HelperCall, SavedMemory

#: What operands in a scratch begin at, and the bytes of the largest one that is kept.
_ALIGNED, _KEPT = 64, 16 << 20


class Scratch:
    """Memory of copied operands, which all batches of a plan use in turn."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def of(self, size: int) -> torch.Tensor:
        """Return at least so many bytes, the same as in the last call if possible."""
        memory = self._memory
        if memory is None or memory.numel() < size:
            memory = torch.empty(size, dtype=torch.uint8)
            self._memory = memory if size <= _KEPT else None
        return memory


def gathers(operand: Operand, buffers: Sequence[Buffer]) -> bool:
    """Can C copy the rows of an operand? They are tensors of the call, on the CPU."""
    rows = [buffers[b] for b in operand.buffers]
    return operand.stack in (COPIED, ADDRESSED) and all(
        x.device == CPU and x.kind != "temp" for x in rows
    )


def gathered_bytes(operand: Operand, buffers: Sequence[Buffer]) -> int:
    """Return the bytes of an operand in a scratch."""
    size = _row_bytes(operand, buffers) * len(operand.buffers)
    return -(-size // _ALIGNED) * _ALIGNED


def gather(
    operand: Operand,
    buffers: Sequence[Buffer],
    position: Callable[[int], int],
    pool: array[int],
    helper: ctypes.PyDLL,
    to: int,
) -> Callable[[], object]:
    """Return a C call that copies rows from their addresses in the pool to `to`."""
    n, size = len(operand.buffers), _row_bytes(operand, buffers)
    arrays = {
        "position": array("q", map(position, operand.buffers)),
        "bytes": array("q", [size]) * n,
    }
    struct = SavedMemory(n)
    struct.memory = to
    others = ctypes.c_void_p, ctypes.c_int64
    saved = HelperCall(struct, helper.fuseopt_saved, arrays, others)
    address = pool.buffer_info()[0]
    return lambda: saved(address, 0)


def _row_bytes(operand: Operand, buffers: Sequence[Buffer]) -> int:
    """Return the bytes from the first element of a row to past its last."""
    x = buffers[operand.buffers[0]]
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride, strict=True))
    return (last + 1) * DTYPE_BYTES[x.dtype]
