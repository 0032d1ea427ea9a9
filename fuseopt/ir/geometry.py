"""Shapes and strides: element counts, and layouts in memory.

Strides count elements. A dimension of one element may have any stride.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Shape = tuple[int, ...]


def numel(shape: Iterable[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)


def contiguous_strides(shape: Sequence[int]) -> Shape:
    """Return the strides of a tensor without gaps whose last dimension is innermost."""
    strides: list[int] = []
    step = 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Is the last dimension innermost, without gaps?"""
    expected = contiguous_strides(shape)
    return all(
        n == 1 or s == e for n, s, e in zip(shape, stride, expected, strict=True)
    )


def is_block(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Do the elements fill one block of memory, in some order of dimensions?"""
    expected = 1
    for s, n in sorted(zip(stride, shape, strict=True)):
        if n != 1:
            if s != expected:
                return False
            expected *= n
    return True


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> Shape:
    """Return a key, equal for tensors of one shape that order elements alike in memory.

    For a dense block these are its dimensions, outermost first; else -1 and the
    strides.
    """
    dims = [d for d, n in enumerate(shape) if n != 1]
    if is_block(shape, stride):
        return tuple(sorted(dims, key=lambda d: -stride[d]))
    return -1, *(stride[d] for d in dims)
