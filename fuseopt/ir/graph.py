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

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .expressions import Expr
from .nodes import (
    Body,
    Buffer,
    Column,
    Extern,
    ForeachSchedulerNode,
    Instr,
    Literal,
    Node,
    Row,
    ScalarRef,
    SchedulerNode,
    Symbol,
    kept,
    read_by,
    rows_of,
    span,
    storage_bytes,
    symbols,
    written_by,
)
from .opcodes import (
    ARITHMETIC,
    ARITY,
    AVX2,
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
from .products import Alone, Batch, Stack


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

    `list_index`: the first one at which it holds; -1 if neither has a list. `line`: the
    consumer's line of Python; "" where nobody knows it.
    """

    producer: str
    consumer: str
    code: str
    detail: str
    list_index: int = -1
    line: str = ""

    @property
    def seen(self) -> str:
        """What the rule saw, and where."""
        at = f"at list index {self.list_index}" if self.list_index >= 0 else ""
        return " ".join(filter(None, (self.detail, at)))


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
    those lanes of `variants` touch that make numbers (see `makes_numbers`). `first` are
    variants of few lanes that run before all others, which may use what they make. No
    two of either depend on each other.
    """

    name: str
    variants: tuple[Variant, ...]
    finish: tuple[Variant, ...] = ()
    first: tuple[Variant, ...] = ()

    @property
    def every(self) -> tuple[Variant, ...]:
        """All variants, in the order in which targets and tables number them."""
        return (*self.variants, *self.finish, *self.first)

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
    kernel has a `finish`, which would have to wait for lanes of all blocks, or what is
    to run `first`, for which they would have to wait.
    """

    kernels: tuple[Kernel, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return "+".join(k.name for k in self.kernels)

    def part(self, block: Block, k: int) -> Kernel:
        """Kernel k with the lanes of one block alone; a variant may have none."""
        lanes: dict[int, list[int]] = {}
        for v, lane in block[k]:
            lanes.setdefault(v, []).append(lane)
        kernel = self.kernels[k]
        variants = [_some(x, lanes.get(v, [])) for v, x in enumerate(kernel.variants)]
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
    the last step has ended. `remote`: of each other device than the CPU, the first byte
    and the end of its part of the arena; the CPU's part is the last one.
    """

    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0
    returned: frozenset[int] = frozenset()
    loose: frozenset[int] = frozenset()
    freed: tuple[tuple[int, ...], ...] = ()
    remote: dict[str, tuple[int, int]] = field(default_factory=dict)


#: What a schedule is made of.
Step = Kernel | Run | Extern | Batch


@dataclass(frozen=True)
class Schedule:
    """What runs, in order, and what did not fuse and why.

    `temps` are the temp buffers that need memory; `memory` says where they get it, and
    `stacks` which of them lie one behind the other. `alone`: products of matrices that
    no Batch has. `branches`: of a series of ATen calls, by the place of its first step,
    the places of the steps of each branch; a device may run branches at one time.
    """

    steps: tuple[Step, ...]
    refusals: tuple[Refusal, ...] = ()
    temps: tuple[int, ...] = ()
    memory: MemoryPlan = field(default_factory=MemoryPlan)
    stacks: tuple[Stack, ...] = ()
    alone: tuple[Alone, ...] = ()
    branches: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """All kernels, those of runs among them, in order."""
        kernels: list[Kernel] = []
        for step in self.steps:
            if not isinstance(step, (Extern, Batch)):
                kernels += step.kernels if isinstance(step, Run) else [step]
        return tuple(kernels)

    @property
    def externs(self) -> tuple[Extern, ...]:
        """All ATen calls of the graph, rows of batches among them, in order."""
        externs: list[Extern] = []
        for step in self.steps:
            if isinstance(step, (Extern, Batch)):
                externs += step.externs if isinstance(step, Batch) else [step]
        return tuple(externs)

    @property
    def batches(self) -> tuple[Batch, ...]:
        """All batched products, in order."""
        return tuple(s for s in self.steps if isinstance(s, Batch))


__all__ = [
    "ALIGNED",
    "ARITHMETIC",
    "ARITY",
    "AVX2",
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
    "Alone",
    "Batch",
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
    "Stack",
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
