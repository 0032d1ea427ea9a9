"""Nodes: a `Body` of arithmetic, and the values that it reads and writes, row by row.

A `Body` is written once and shared by every row that runs it. A value is a number: a
version of a `Buffer`, which is a region of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

from .geometry import numel
from .opcodes import DTYPE_BYTES


class Instr(NamedTuple):
    """One SSA instruction of a body; its name is its position.

    `dtype` is the type of its result. Arithmetic happens in that type. Comparisons are
    an exception: they compare in the type of their arguments and return "b8".
    """

    op: str
    args: tuple[int, ...] = ()
    dtype: str = "f32"
    attr: int | float | None = None


@dataclass(frozen=True, eq=False)
class Body:
    """Arithmetic of one recorded call: loads, scalars, results to store.

    `reads`: storage dtype of each operand. `writes`: for each result, the instruction
    that computes it and its storage dtype. `reduction`: "" for a pointwise body; "full"
    if it folds a tensor to one number, "dims" if to one for each row or column. Bodies
    compare by identity: capture interns them.
    """

    name: str
    reads: tuple[str, ...]
    n_scalars: int
    instrs: tuple[Instr, ...]
    writes: tuple[tuple[int, str], ...]
    reduction: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Literal:
    """A scalar whose value is a literal in the graph.

    Literals compare by identity, since 0.0 and -0.0 are equal numbers but different
    scalars. Capture makes one object per number.
    """

    value: float


@dataclass(frozen=True, slots=True)
class Symbol:
    """A scalar of the host: `expr` is its index in the numbers of a Graph."""

    expr: int


ScalarRef = Literal | Symbol


def symbols(scalars: Iterable[ScalarRef]) -> list[int]:
    """Return the indices of the host's numbers among scalars, each once."""
    return list(dict.fromkeys(s.expr for s in scalars if isinstance(s, Symbol)))


class Buffer(NamedTuple):
    """A strided region of memory.

    `kind` is "static" (a parameter or state, an attribute of the graph) or "arg" (a
    placeholder: grads, a tensor lr). It is "view" for an alias of one of those, and
    "temp" for memory made inside the step. `source` is the index of a static or arg
    among the tensors of a call, statics first; -1 for others. Strides and offset count
    elements. Buffers with equal `storage` lie in one allocation.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    storage: int
    kind: str
    source: int
    device: str

    @property
    def numel(self) -> int:
        return numel(self.shape)

    @property
    def first_byte(self) -> int:
        """Byte offset of the buffer in its storage."""
        return self.offset * DTYPE_BYTES[self.dtype]


def kept(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that remains when `dims` are reduced."""
    return tuple([n for d, n in enumerate(shape) if d not in dims])


def storage_bytes(members: Iterable[Buffer]) -> int:
    """Return the bytes of memory that the buffers of one storage need together."""
    return max(b.first_byte + span(b)[1] - span(b)[0] for b in members)


def span(b: Buffer) -> tuple[int, int]:
    """Return the range of bytes of its storage that a buffer may touch."""
    if 0 in b.shape:
        return 0, 0
    size = DTYPE_BYTES[b.dtype]
    last = sum((n - 1) * s for n, s in zip(b.shape, b.stride, strict=True))
    return b.offset * size, (b.offset + last + 1) * size


class SchedulerNode(NamedTuple):
    """One position of one recorded call.

    `reads` and `writes` are value numbers. `dims`: the dimensions of its operand that a
    reduction removes.
    """

    body: Body
    reads: tuple[int, ...]
    scalars: tuple[ScalarRef, ...]
    writes: tuple[int, ...]
    call: int  # number of the recorded call, equal for all positions of a list
    line: str  # source line of the step, for messages
    dims: tuple[int, ...] = ()


#: One entry for each row of a node.
Column = tuple[int, ...]


class ForeachSchedulerNode(NamedTuple):
    """A recorded foreach call, or a line of a loop over lanes: a row for each index.

    `reads[k]` and `writes[k]` are columns of value numbers, and `scalars[k]` is a
    column of scalars. `dims` is a column of the dimensions that a reduction removes;
    empty otherwise. No row touches memory that another row writes, so rows run in any
    order.
    """

    body: Body
    reads: tuple[Column, ...]
    scalars: tuple[tuple[ScalarRef, ...], ...]
    writes: tuple[Column, ...]
    call: int  # number of the recorded call; for a loop, that of its first iteration
    line: str  # source line of the step, for messages
    dims: tuple[tuple[int, ...], ...] = ()

    @property
    def rows(self) -> int:
        return len(self.writes[0])

    def row(self, i: int) -> SchedulerNode:
        """Return row i as a SchedulerNode."""
        return SchedulerNode(
            self.body,
            tuple([c[i] for c in self.reads]),
            tuple([c[i] for c in self.scalars]),
            tuple([c[i] for c in self.writes]),
            self.call,
            self.line,
            self.dims[i] if self.dims else (),
        )

    def pick(self, rows: Sequence[int]) -> ForeachSchedulerNode:
        """Return the same call with some of its rows, in the given order."""
        return self._replace(
            reads=tuple([tuple([c[i] for i in rows]) for c in self.reads]),
            scalars=tuple([tuple([c[i] for i in rows]) for c in self.scalars]),
            writes=tuple([tuple([c[i] for i in rows]) for c in self.writes]),
            dims=tuple([self.dims[i] for i in rows]) if self.dims else (),
        )


class Extern(NamedTuple):
    """An ATen call that runs unchanged.

    `payload` is the call's index in capture's side table. `ordered` calls keep their
    order among each other: they share a random generator, or communicate with other
    processes.
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    payload: int
    reason: str
    line: str
    ordered: bool = False


Node = ForeachSchedulerNode | Extern
#: One row of a node; an Extern is one row.
Row = SchedulerNode | Extern


def rows_of(node: Node) -> Iterator[Row]:
    """Yield the rows of a node one by one."""
    if isinstance(node, Extern):
        yield node
    else:
        yield from map(node.row, range(node.rows))


def read_by(node: Node) -> Iterable[int]:
    """Return the values that all rows of a node read."""
    return node.reads if isinstance(node, Extern) else chain.from_iterable(node.reads)


def written_by(node: Node) -> Iterable[int]:
    """Return the values that all rows of a node write."""
    return node.writes if isinstance(node, Extern) else chain.from_iterable(node.writes)
