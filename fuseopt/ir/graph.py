"""The IR: what a captured optimizer step is, in frozen data without torch.

A `Graph` holds *buffers* (regions of memory), *values* (a version of a buffer, SSA) and
*nodes* in program order. A node is either a `ForeachSchedulerNode`, a recorded call of
lists with a row for each list index, whose arithmetic is one `Body`; or an `Extern`, an
ATen call run as it is. A call without lists has one row, and so has a
`SchedulerNode`: what capture records, and one row of a node by itself.

Lanes are columns: a step of 1,000 lanes has as many nodes as one of three, and each
operand of a node is a column of 1,000 value numbers. So scheduling, checking and
generating code cost what the distinct bodies cost.

The scheduler turns a Graph into a `Schedule`: kernels made of `Variant`s (one fused
body with the table of its lanes), runs of kernels that go block by block, and externs,
in the order in which they run; and where their temps lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

from .expressions import Expr
from .geometry import numel
from .opcodes import (
    ARITHMETIC,
    ARITY,
    BY_ROWS,
    DTYPE_BYTES,
    FLOATS,
    FROM_BF16,
    FROM_F16,
    FUNCTIONS,
    NATIVE,
    OPAQUE,
    REDUCTIONS,
    VECTOR,
    VENDOR,
)


class Instr(NamedTuple):
    """One SSA instruction of a body; it is named by its position.

    `dtype` is the type of its result. Arithmetic happens in that type, except for
    comparisons, which compare in the type of their arguments and give "b8".
    """

    op: str
    args: tuple[int, ...] = ()
    dtype: str = "f32"
    attr: int | float | None = None


@dataclass(frozen=True, eq=False)
class Body:
    """Arithmetic of one recorded call: loads, scalars, results to store.

    `reads`: storage dtype of each operand. `writes`: for each result the instruction
    that makes it and the storage dtype. `reduction`: "" for a pointwise body; "full" if
    it makes one number of a tensor, "dims" if one for each row or column. Compared by
    identity: capture interns bodies.
    """

    name: str
    reads: tuple[str, ...]
    n_scalars: int
    instrs: tuple[Instr, ...]
    writes: tuple[tuple[int, str], ...]
    reduction: str = ""


@dataclass(frozen=True, eq=False, slots=True)
class Literal:
    """A scalar whose value stood in the graph.

    Compared by identity (0.0 and -0.0 are equal numbers, but not equal scalars):
    capture makes one object per number.
    """

    value: float


@dataclass(frozen=True, slots=True)
class Symbol:
    """A scalar of the host: `expr` is its place among the numbers of a Graph."""

    expr: int


ScalarRef = Literal | Symbol


def symbols(scalars: Iterable[ScalarRef]) -> list[int]:
    """The numbers of the host among scalars, each once."""
    return list(dict.fromkeys(s.expr for s in scalars if isinstance(s, Symbol)))


class Buffer(NamedTuple):
    """A strided region of memory.

    `kind` is "static" (a parameter or state, an attribute of the graph), "arg" (a
    placeholder: grads, a tensor lr), "view" (another way to see one of those) or "temp"
    (made inside the step). `source` is the position of a static or arg among the
    tensors of a call, statics first; -1 for others. Strides and offset count elements;
    buffers with equal `storage` lie in one allocation.
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
        """Where in its storage the buffer begins."""
        return self.offset * DTYPE_BYTES[self.dtype]


def kept(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that is left when `dims` are reduced away."""
    return tuple([n for d, n in enumerate(shape) if d not in dims])


def storage_bytes(members: Iterable[Buffer]) -> int:
    """The bytes of memory that the buffers of one storage need together."""
    return max(b.first_byte + span(b)[1] - span(b)[0] for b in members)


def span(b: Buffer) -> tuple[int, int]:
    """The range of bytes of its storage that a buffer may touch."""
    if 0 in b.shape:
        return 0, 0
    size = DTYPE_BYTES[b.dtype]
    last = sum((n - 1) * s for n, s in zip(b.shape, b.stride, strict=True))
    return b.offset * size, (b.offset + last + 1) * size


class SchedulerNode(NamedTuple):
    """One position of one recorded call. `reads` and `writes` are value numbers.

    `dims`: the dimensions of its operand that a reduction takes away.
    """

    body: Body
    reads: tuple[int, ...]
    scalars: tuple[ScalarRef, ...]
    writes: tuple[int, ...]
    call: int  # number of the recorded call, shared by all positions of its lists
    line: str  # source line of the step, for messages
    dims: tuple[int, ...] = ()


#: One entry for each row of a node.
Column = tuple[int, ...]


class ForeachSchedulerNode(NamedTuple):
    """A recorded call of lists, or a line of a loop over lanes: a row for each index.

    `reads[k]` and `writes[k]` are columns of value numbers, `scalars[k]` is a column of
    scalars, and `dims`, of a reduction alone, one of the dimensions that it takes away.
    No row touches memory that another row writes, so rows run in any order.
    """

    body: Body
    reads: tuple[Column, ...]
    scalars: tuple[tuple[ScalarRef, ...], ...]
    writes: tuple[Column, ...]
    call: int  # number of the recorded call; of a loop, of its first round
    line: str  # source line of the step, for messages
    dims: tuple[tuple[int, ...], ...] = ()

    @property
    def rows(self) -> int:
        return len(self.writes[0])

    def row(self, i: int) -> SchedulerNode:
        """One row by itself."""
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
        """The same call with some of its rows, in another order or not."""
        return self._replace(
            reads=tuple([tuple([c[i] for i in rows]) for c in self.reads]),
            scalars=tuple([tuple([c[i] for i in rows]) for c in self.scalars]),
            writes=tuple([tuple([c[i] for i in rows]) for c in self.writes]),
            dims=tuple([self.dims[i] for i in rows]) if self.dims else (),
        )


class Extern(NamedTuple):
    """An ATen call that runs as it is. `payload` finds the call in capture's side
    table.

    `ordered` calls keep their order among each other (they share a random generator).
    """

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    payload: int
    reason: str
    line: str
    ordered: bool = False


Node = ForeachSchedulerNode | Extern
#: One row of a node; an Extern is one.
Row = SchedulerNode | Extern


def rows_of(node: Node) -> Iterator[Row]:
    """The rows of a node, each by itself."""
    if isinstance(node, Extern):
        yield node
    else:
        yield from map(node.row, range(node.rows))


def read_by(node: Node) -> Iterable[int]:
    """The values that all rows of a node read."""
    return node.reads if isinstance(node, Extern) else chain.from_iterable(node.reads)


def written_by(node: Node) -> Iterable[int]:
    """The values that all rows of a node write."""
    return node.writes if isinstance(node, Extern) else chain.from_iterable(node.writes)


@dataclass(frozen=True)
class Graph:
    """A captured step. `values[v]` is the buffer of value v.

    `initial[b]` is the value a buffer holds on entry (-1 for temps; a view made after
    its memory was written has one that nobody reads); `final[b]` the value its memory
    must hold at the end (-1 where nobody looks). `outputs` are the buffers the step
    returns. `numbers[i]` is what Symbol i is at each call.
    """

    buffers: tuple[Buffer, ...]
    values: tuple[int, ...]
    nodes: tuple[Node, ...]
    initial: tuple[int, ...]
    final: tuple[int, ...]
    outputs: tuple[int, ...]
    numbers: tuple[Expr, ...] = ()


# ---------------------------------------------------------------- after scheduling


class Slot(NamedTuple):
    """A column of a kernel's pointer table: one buffer per lane.

    `domain` is "lane" (one number per lane), "element", or "output" (one number for
    each result of the lane's reductions).
    """

    dtype: str
    domain: str
    read: bool
    write: bool


class Refusal(NamedTuple):
    """Why two nodes were not fused: the rule's code and what it saw.

    `list_index`: the first one at which it holds; -1 if neither has a list.
    """

    producer: str
    consumer: str
    code: str
    detail: str
    list_index: int = -1


@dataclass(frozen=True)
class Variant:
    """A fused body and the table of its lanes.

    `lane_code` runs once per lane, `code` once per element, `output_code` once per
    result of the reductions; all index into the one numbering `instrs`. `stores` are
    (instruction, slot) pairs. `columns[s][i]` is the buffer of slot s in lane i,
    `scalars[k][i]` scalar k of lane i, `shapes[i]` the index space of lane i.

    `reduction` is that of its bodies ("" if none reduces); `reduced[i]` are the
    dimensions taken away in lane i, and `operands[i]` is the buffer whose layout gives
    the order in which eager would add.
    """

    instrs: tuple[Instr, ...]
    lane_code: tuple[int, ...]
    code: tuple[int, ...]
    stores: tuple[tuple[int, int], ...]
    slots: tuple[Slot, ...]
    columns: tuple[tuple[int, ...], ...]
    scalars: tuple[tuple[ScalarRef, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    nodes: tuple[str, ...] = ()
    output_code: tuple[int, ...] = ()
    reduction: str = ""
    reduced: tuple[tuple[int, ...], ...] = ()
    operands: tuple[int, ...] = ()

    @property
    def lanes(self) -> int:
        return len(self.shapes)

    def touched(self, lane: int) -> list[int]:
        """The buffers of one lane, by slot."""
        return [column[lane] for column in self.columns]

    @property
    def folds(self) -> tuple[int, ...]:
        """The instructions that reduce, in order."""
        return tuple(x for x in self.output_code if self.instrs[x].op in REDUCTIONS)


def makes_numbers(v: Variant) -> bool:
    """Does each lane of a variant end with numbers alone, so that it is known when it
    is done: is it folded to one number, or has it no elements?
    """
    return v.reduction == "full" or all(s.domain == "lane" for s in v.slots)


@dataclass(frozen=True)
class Kernel:
    """One launch: variants that are proven not to depend on one another.

    `finish` are variants of few lanes that run when all others have: they may use what
    those lanes of `variants` touch that make numbers (see `makes_numbers`). No two of
    them depend on each other.
    """

    name: str
    variants: tuple[Variant, ...]
    finish: tuple[Variant, ...] = ()

    @property
    def every(self) -> tuple[Variant, ...]:
        """All variants, in the order in which targets and tables number them."""
        return (*self.variants, *self.finish)

    @property
    def lanes(self) -> int:
        return sum(v.lanes for v in self.variants)


#: Of each kernel of a run, the (variant, lane) pairs of one block, in order.
Block = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Run:
    """Kernels of the CPU that go block by block: all of them over some lanes, in order,
    then over the lanes of the next block.

    `blocks[i][k]` are the lanes of kernel k in block i; every lane is in one block. No
    kernel has a `finish`, which would have to wait for lanes of all blocks.
    """

    kernels: tuple[Kernel, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return "+".join(k.name for k in self.kernels)

    def part(self, block: Block, k: int) -> Kernel:
        """Kernel k with the lanes of one block alone; a variant may have none."""
        own: dict[int, list[int]] = {}
        for v, lane in block[k]:
            own.setdefault(v, []).append(lane)
        kernel = self.kernels[k]
        variants = [_some(x, own.get(v, [])) for v, x in enumerate(kernel.variants)]
        return replace(kernel, variants=tuple(variants))


def _some(v: Variant, lanes: list[int]) -> Variant:
    """A variant with some of its lanes."""
    return replace(
        v,
        columns=tuple([tuple([c[i] for i in lanes]) for c in v.columns]),
        scalars=tuple([tuple([c[i] for i in lanes]) for c in v.scalars]),
        shapes=tuple([v.shapes[i] for i in lanes]),
        reduced=tuple([v.reduced[i] for i in lanes]) if v.reduced else (),
        operands=tuple([v.operands[i] for i in lanes]) if v.operands else (),
    )


#: Bytes of which each storage in an arena begins at a multiple.
ALIGNED = 64


@dataclass(frozen=True)
class MemoryPlan:
    """Where the temps of a schedule lie, by storage. What is not named here is
    allocated at each call.

    `offsets`: the first byte in the step's arena, which is `size` bytes long; two
    storages may have one place if no block of a run touches both. `returned`: an extern
    returns it, so that nobody else allocates. `loose`: no kernel and no other view sees
    it, so that it keeps the strides with which an extern returns it. `freed[i]`: what
    nobody looks at once the step at place i has run; () if nothing is given back before
    the last step has ended.
    """

    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0
    returned: frozenset[int] = frozenset()
    loose: frozenset[int] = frozenset()
    freed: tuple[tuple[int, ...], ...] = ()


#: What a schedule is made of.
Step = Kernel | Run | Extern


@dataclass(frozen=True)
class Schedule:
    """What runs, in order, and what did not fuse and why.

    `temps` are the temp buffers that need memory; `memory` says where they get it.
    """

    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...] = ()
    temps: tuple[int, ...] = ()
    memory: MemoryPlan = field(default_factory=MemoryPlan)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels, those of runs among them, in order."""
        found: list[Kernel] = []
        for step in self.steps:
            if not isinstance(step, Extern):
                found += step.kernels if isinstance(step, Run) else [step]
        return tuple(found)

    @property
    def externs(self) -> tuple[Extern, ...]:
        """All ATen calls that run as they are, in order."""
        return tuple(s for s in self.steps if isinstance(s, Extern))


__all__ = [
    "ALIGNED",
    "ARITHMETIC",
    "ARITY",
    "BY_ROWS",
    "DTYPE_BYTES",
    "FLOATS",
    "FROM_BF16",
    "FROM_F16",
    "FUNCTIONS",
    "NATIVE",
    "OPAQUE",
    "REDUCTIONS",
    "VECTOR",
    "VENDOR",
    "Block",
    "Body",
    "Buffer",
    "Column",
    "Extern",
    "ForeachSchedulerNode",
    "Graph",
    "Instr",
    "Kernel",
    "Literal",
    "MemoryPlan",
    "Node",
    "Refusal",
    "Row",
    "Run",
    "ScalarRef",
    "Schedule",
    "SchedulerNode",
    "Slot",
    "Step",
    "Symbol",
    "Variant",
    "kept",
    "makes_numbers",
    "read_by",
    "rows_of",
    "span",
    "storage_bytes",
    "symbols",
    "written_by",
]
