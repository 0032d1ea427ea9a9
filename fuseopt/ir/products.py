"""Calls on matrices that one batched ATen call computes, and the places of their rows.

Most are products. Others treat a tensor of matrices matrix by matrix, such as a QR
decomposition; they may have several results.

A `Batch` replaces several Externs, with one *row* for each. Its rows read and write
*stacks*: temps of one size, one after another in one allocation. So the producer of a
row writes it straight into the stack, without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .nodes import Extern, Symbol

#: Shape, strides and offset of one row, in elements.
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
#: COPIED: the rows of an operand are copied together at each call, those of a result
#: apart. SHARED: all rows have the same operand. ADDRESSED: generated code reads the
#: rows of an operand where the tensors of the call have them.
COPIED, SHARED, ADDRESSED = -1, -2, -3
#: Layouts of the rows of a result: without gaps, or with padding between rows.
DENSE, PADDED = "dense", "padded"
#: Made by generated code without gaps, and in turn with batches that follow it: all of
#: them for one row, then for the next one.
CHAINED = "chained"


#: A product and what stands around it: `beta * add + (alpha * left) @ right`, with all
#: roundings of eager.
SCALED = "scaled_sum"
#: `addmm` with the bits of a call that writes its first operand.
IN_PLACE = "addmm_"
#: The ops that are products, two of them of batches of matrices. PLACEABLE have a form
#: that writes a given result.
PLACEABLE = ("mm", "addmm", "bmm", "baddbmm")
TIMES = (*PLACEABLE, SCALED, IN_PLACE)
MERGED = ("bmm", "baddbmm")
#: Constant arguments, by name.
Options = tuple[tuple[str, object], ...]


class Product(NamedTuple):
    """A call on matrices that may be batched with other calls.

    `op`: one of TIMES, or the name of another op of ATen. `operands`, `results`:
    buffers, in the order of the call's arguments and of its results. `scales`: beta and
    alpha of ops that add. `options`: the other arguments of an op that is
    not in TIMES.
    """

    op: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    scales: tuple[float | Symbol, ...] = ()
    options: Options = ()


class Stack(NamedTuple):
    """Storages of temps in one allocation, `step` bytes apart."""

    storages: tuple[int, ...]
    step: int
    dtype: str
    device: str


class Operand(NamedTuple):
    """The rows of an operand, or of the result, as one tensor.

    `stack`: its index in Schedule.stacks, or COPIED, SHARED, ADDRESSED. `shape`,
    `stride`: of the tensor that the batched call gets; `first`: its offset in the
    stack. `buffers`: those of the single calls, row by row.
    """

    stack: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    buffers: tuple[int, ...]


class Result(NamedTuple):
    """Shape, strides and dtype of a result of one row."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Trial(NamedTuple):
    """The properties of a batch that may decide the bits of its rows.

    `layouts`: of one row's operands, in the single call. `stacked`: shape, strides and
    offset of the operands of the batched call. `results`: of one row, without gaps.
    `scales`: "0", "1" or "-1" for numbers that BLAS treats specially, "any" for others.
    `options`: see Product. `anywhere`: the operands of the caller, by number, which may
    begin at any element; none on a device.
    """

    op: str
    dtype: str
    device: str
    rows: int
    layouts: tuple[Layout, ...]
    stacked: tuple[Layout, ...]
    results: tuple[Result, ...]
    scales: tuple[str, ...]
    options: Options = ()
    anywhere: tuple[int, ...] = ()


@dataclass(frozen=True)
class Batch:
    """Independent calls on matrices as one batched call, with a row for each.

    `operands` and `results` give the places of rows. `way`: DENSE, PADDED or CHAINED.
    `order`: that of a chain's sums, see runtime/chains.py.
    """

    externs: tuple[Extern, ...]
    op: str
    operands: tuple[Operand, ...]
    results: tuple[Operand, ...]
    scales: tuple[float | Symbol, ...]
    trial: Trial
    way: str
    order: str = ""

    @property
    def name(self) -> str:
        return f"{self.op} x {len(self.externs)}"

    @property
    def reads(self) -> tuple[int, ...]:
        """Values that its rows read."""
        return tuple(v for e in self.externs for v in e.reads)

    @property
    def writes(self) -> tuple[int, ...]:
        """Values that its rows write."""
        return tuple(v for e in self.externs for v in e.writes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call; 0 if it is no product."""
        if self.op not in TIMES:
            return 0
        *_, inner = self.trial.layouts[-2][0]
        count = 2 * len(self.externs) * inner
        for n in self.trial.results[0].shape:
            count *= n
        return count


def chained(steps: Sequence[object]) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each row of CHAINED batches among steps."""
    start = 0
    while start < len(steps):
        end = start
        while end < len(steps) and _is_chained(steps[end]):
            end += 1
        if end > start:
            yield start, end
        start = max(end, start + 1)


def _is_chained(step: object) -> bool:
    return isinstance(step, Batch) and step.way == CHAINED


class Alone(NamedTuple):
    """Calls on matrices that run as single calls, with the reason."""

    what: str
    calls: int
    reason: str
