"""The C++ that kernels have in common: the text of each file of include/, by name.

A kernel is one file: the headers that it needs are copied into it, in this order, so
that its text alone says what it does and names it in the cache.

- prelude: the struct that a launch passes, roots, what every kernel needs;
- functions: calls of the vector library that eager calls;
- halves: how 16-bit floats are read, rounded and written. Loops over neighbours take
  two of them as one word of 32 bits, so that words, floats and comparisons are equally
  wide: a compiler then makes vectors of them and moves no number within a vector;
- bits: a float's bits as an integer, and back;
- walk: loops over tensors of different layouts, a block of elements at a time;
- blocks: what the elements of a block have in common;
- folds: sums in the order in which eager's CPU kernels add;
- pieces: how the threads share what a whole reduction reads;
- rows: the geometry of rows and columns (see runtime/tables/reduction_layout.py);
- folding: loops that feed folds along that geometry;
- driver: the loop of a thread over chunks of elements.
"""

from __future__ import annotations

import functools
from pathlib import Path

FOLDER = Path(__file__).parent / "include"


@functools.cache
def header(name: str) -> str:
    """The text of one of the headers: `header("walk")` is include/walk.h."""
    return (FOLDER / f"{name}.h").read_text(encoding="utf-8")
