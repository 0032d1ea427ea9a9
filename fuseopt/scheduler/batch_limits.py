"""Buffers of a call on matrices -> the reason against a batch of such calls, or ""."""

from __future__ import annotations

from collections.abc import Sequence

from ..ir.graph import Buffer
from ..ir.products import TIMES, Product
from .dependencies import CPU

#: Dtypes of batches, each with the largest number of multiplications of one row. A
#: larger product takes so long that a single call costs nothing extra (bench/NOTES.md).
MOST = {"f32": 1 << 23, "f64": 1 << 23, "bf16": 1 << 24, "f16": 1 << 24}
#: The largest number of elements of an operand's row that is copied into a stack at
#: each call.
COPY = {"f32": 1 << 12, "f64": 1 << 12, "bf16": 1 << 16, "f16": 1 << 16}
#: The same on a device, where a launch takes as long as more work does. Both numbers
#: are derived from its peak, and were not measured.
MOST_REMOTE, COPY_REMOTE = 1 << 30, 1 << 18
#: The most elements of a matrix that is decomposed, or solved with, in a batch. A
#: larger one takes as long alone (bench/NOTES.md).
MOST_DECOMPOSED = 1 << 12
#: The most elements of a single product's result that has a place in the arena, so
#: that C can call the product.
PLACED = 1 << 14


def refusal(buffers: Sequence[Buffer], p: Product) -> str:
    """Return why calls like `p` cannot be a batch: they are too large, or of another
    form. `buffers`: of its operands and results.
    """
    if any(x.device != buffers[0].device for x in buffers):
        return "its matrices are on several devices"
    return _of_product(buffers, p) if p.op in TIMES else _of_matrix(buffers, p)


def _of_product(buffers: Sequence[Buffer], p: Product) -> str:
    result, left = buffers[-1], buffers[-3]
    if result.dtype not in MOST or any(x.dtype != result.dtype for x in buffers):
        return f"no batches of {result.dtype}"
    if 0 in result.shape or 0 in left.shape:
        return "an empty product"
    if 1 in (*result.shape[-2:], left.shape[-1]):
        return "a product of vectors, for which BLAS has other code"
    work = result.numel * left.shape[-1]
    if work > (MOST[result.dtype] if result.device == CPU else MOST_REMOTE):
        return f"{2 * work:,} flops take longer than a call"
    if len(p.operands) == 3 and buffers[0].shape != result.shape:
        return "it adds a tensor of another shape"
    return ""


def _of_matrix(buffers: Sequence[Buffer], p: Product) -> str:
    """Return why calls that treat matrices one by one cannot be a batch."""
    operands = buffers[: len(p.operands)]
    if buffers[0].device != CPU:
        return "decompositions are batched on a CPU only"
    if not p.results:
        return ""
    if operands[0].dtype not in MOST or any(
        x.dtype != operands[0].dtype for x in operands
    ):
        return f"no batches of {operands[0].dtype}"
    if any(0 in x.shape for x in buffers):
        return "an empty matrix"
    if any(len(x.shape) != 2 for x in operands):
        return "it is a batch already"
    if max(x.numel for x in buffers) > MOST_DECOMPOSED:
        return "it takes longer than a call"
    return ""
