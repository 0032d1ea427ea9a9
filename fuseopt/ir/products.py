"""Products of matrices that one batched ATen call computes, and where their rows lie.

A `Batch` takes the place of several Externs, one for each *row*. What its rows read and
write lies in *stacks*: temps of one size, one behind the other in one allocation. So
whoever makes a row writes it straight into the stack, and nothing is copied together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .nodes import Extern, Symbol

#: Shape, strides and offset of one row, in elements.
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
#: An operand whose rows are copied together at each call; one that all rows share.
COPIED, SHARED = -1, -2
#: How the rows of a result lie: without gaps, or with some bytes between them.
DENSE, PADDED = "dense", "padded"


class Product(NamedTuple):
    """A product that may share a call with others.

    `op`: "mm", "addmm", "bmm" or "baddbmm". `operands`: buffers, in the order of the
    call's arguments; `result`: the buffer that it makes. `scales`: beta and alpha of
    addmm and baddbmm.
    """

    op: str
    operands: tuple[int, ...]
    result: int
    scales: tuple[float | Symbol, ...] = ()


class Stack(NamedTuple):
    """Storages of temps, `step` bytes from one to the next in one allocation."""

    storages: tuple[int, ...]
    step: int
    dtype: str
    device: str


class Operand(NamedTuple):
    """The rows of an operand, or of the result, as one tensor.

    `stack`: its place among Schedule.stacks, or COPIED, or SHARED. `shape`, `stride`:
    of the tensor that the batched call gets; `first`: its offset in the stack.
    `buffers`: those of the single calls, row by row.
    """

    stack: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    first: int
    buffers: tuple[int, ...]


class Trial(NamedTuple):
    """All of a batch that may decide which bits its rows get.

    `layouts`: of one row's operands, in the single call. `stacked`: shape, strides and
    offset of the operands of the batched call; `result`: the shape of one row's result.
    `scales`: "0", "1" or "-1" for numbers that BLAS treats apart, "any" for others.
    """

    op: str
    dtype: str
    device: str
    rows: int
    layouts: tuple[Layout, ...]
    stacked: tuple[Layout, ...]
    result: tuple[int, ...]
    scales: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """Products that do not depend on one another, as one batched call: a row each.

    `operands` and `result` say where rows lie; `way`: DENSE or PADDED, see Trial.
    """

    externs: tuple[Extern, ...]
    op: str
    operands: tuple[Operand, ...]
    result: Operand
    scales: tuple[float | Symbol, ...]
    trial: Trial
    way: str

    @property
    def name(self) -> str:
        return f"{self.op} x {len(self.externs)}"

    @property
    def reads(self) -> tuple[int, ...]:
        """The values that its rows read."""
        return tuple(v for e in self.externs for v in e.reads)

    @property
    def writes(self) -> tuple[int, ...]:
        """The values that its rows write."""
        return tuple(v for e in self.externs for v in e.writes)

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call."""
        *_, inner = self.trial.layouts[-2][0]
        count = 2 * len(self.externs) * inner
        for n in self.trial.result:
            count *= n
        return count


class Alone(NamedTuple):
    """Products that run as single calls, and why."""

    what: str
    calls: int
    reason: str
