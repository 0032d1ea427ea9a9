"""Places of the rows of a batch: in a stack, or anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..ir.geometry import numel
from ..ir.graph import DTYPE_BYTES, Buffer
from ..ir.products import Layout, Operand, Stack
from .batch_limits import MOST
from .dependencies import CPU

#: Bytes between rows of a result that are not adjacent, and their alignment: those of a
#: single call on the CPU, and on a device. Libraries of devices check 256 bytes.
GAP, GAP_REMOTE = 64, 256
#: Numbers that BLAS treats apart.
APART = (0.0, 1.0, -1.0)


class Refused(Exception):
    """Rows cannot be a batch; the message gives the reason."""


def merged_rows(
    buffers: tuple[int, ...], x: Buffer, stack: int, row: int, step: int, merged: bool
) -> Operand:
    """Return rows like `x`, `step` bytes apart, as one tensor of one more dimension.

    Batches of batches have their first two dimensions `merged`.
    """
    each, uneven = divmod(step, DTYPE_BYTES[x.dtype])
    if uneven:
        raise Refused("its rows are not aligned to elements")
    first = x.offset + row * each
    shape, stride, n = x.shape, x.stride, len(buffers)
    if not merged:
        return Operand(stack, (n, *shape), (each, *stride), first, buffers)
    inner = stride[0] if shape[0] > 1 else each
    if each != shape[0] * inner and shape[0] > 1:
        raise Refused("its batches are not contiguous")
    return Operand(
        stack, (n * shape[0], *shape[1:]), (inner, *stride[1:]), first, buffers
    )


def layout_of(x: Buffer) -> Layout:
    """Return shape, strides and offset of a buffer."""
    return x.shape, x.stride, x.offset


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(numel(shape[d + 1 :]) for d in range(len(shape)))


def uneven(stack: Stack) -> bool:
    """Do rows of numbers, whose sums depend on alignment, begin at any byte?"""
    gap = GAP if stack.device == CPU else GAP_REMOTE
    return stack.dtype in MOST and stack.step % gap != 0


def anywhere(
    buffers: Sequence[Buffer], columns: Iterable[Sequence[int]]
) -> tuple[int, ...]:
    """Return the operands on the CPU, by number, with rows that the caller has.

    Temps begin where eager's do. `columns` has the buffers of each operand's rows.
    """
    aligned = {x.storage for x in buffers if x.kind == "temp" or x.device != CPU}
    return tuple(
        k
        for k, rows in enumerate(columns)
        if any(buffers[b].storage not in aligned for b in rows)
    )


def kind_of_scale(scale: object) -> str:
    """Return how BLAS distinguishes a number."""
    if isinstance(scale, float) and scale in APART:
        return f"{scale:g}"
    return "any"
