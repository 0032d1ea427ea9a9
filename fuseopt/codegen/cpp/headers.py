"""Common C++ of kernels: the text of each file of include/, by name.

A kernel is one file: the headers that it needs are copied into it, in this order. So
its text alone is complete, and identifies it in the cache.

- prelude: the struct that a launch passes, roots, what every kernel needs;
- functions: calls of the vector library that eager calls;
- halves: reading, rounding and writing of 16-bit floats. Loops over neighbours take two
    of them as one word of 32 bits. Words, floats and comparisons are then equally wide:
    a compiler vectorizes them without moving numbers within a vector;
- bits: a float's bits as an integer, and back;
- quotients: divisions as products, where those have the same bits;
- walk: loops over tensors of different layouts, a block of elements at a time;
- blocks: what the elements of a block have in common;
- folds: sums in the order in which eager's CPU kernels add;
- pieces: how the threads share the operand of a whole reduction;
- rows: the geometry of rows and columns (see runtime/tables/reduction_layout.py);
- folding: loops that feed folds along that geometry;
- modes: threads treat denormals as the caller does;
- driver: the loop of a thread over chunks of elements.
"""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).parent / "include"


@functools.cache
def header(name: str) -> str:
    """Return the text of one of the headers: `header("walk")` is include/walk.h."""
    return (FOLDER / f"{name}.h").read_text(encoding="utf-8")
