"""Frozen data, without torch, that represents a captured optimizer step.

A `Graph` holds *buffers* (regions of memory), *values* (versions of a buffer, SSA) and
*nodes* in program order. A node is either a `ForeachSchedulerNode` or an `Extern`, an
ATen call that runs unchanged. A `ForeachSchedulerNode` is a recorded foreach call with
a row for each list index, whose arithmetic is one `Body`. A call without lists has one
row. A `SchedulerNode` is a single row; capture records these.

Lanes are columns: a step of 1,000 lanes has as many nodes as one of three. Each operand
of a node is a column of 1,000 value numbers. So the cost of scheduling, checking and
code generation depends on the number of distinct bodies.

The scheduler turns a Graph into a `Schedule`: kernels, runs of kernels that go block by
block, and externs, in running order. A kernel consists of `Variant`s, each one fused
body with the table of its lanes. A Schedule also has the places of its temps.
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

    `initial[b]` is the value of buffer b on entry: -1 for temps. A view made after its
    memory was written has an initial value that nothing reads. `final[b]` is the value
    that its memory must hold at the end, or -1 if nothing reads it. `outputs` are the
    buffers that the step returns. `numbers[i]` is the expression of Symbol i.
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
    """The reason why two nodes were not fused: the rule's code and a detail.

    `list_index`: the first index at which the rule applies; -1 if neither has a list.
    `line`: the consumer's line of Python, or "".
    """

    producer: str
    consumer: str
    code: str
    detail: str
    list_index: int = -1
    line: str = ""

    @property
    def seen(self) -> str:
        """Detail of the rule, with the list index."""
        at = f"at list index {self.list_index}" if self.list_index >= 0 else ""
        return " ".join(filter(None, (self.detail, at)))


@dataclass(frozen=True)
class Variant:
    """A fused body and the table of its lanes.

    `lane_code` runs once per lane, `code` once per element, and `output_code` once per
    result of the reductions. All index into the one numbering `instrs`. `stores` are
    (instruction, slot) pairs. `columns[s][i]` is the buffer of slot s in lane i,
    `scalars[k][i]` scalar k of lane i, `shapes[i]` the index space of lane i.

    `reduction` is that of its bodies ("" if none reduces). `reduced[i]` are the
    dimensions that lane i reduces. The layout of buffer `operands[i]` gives the order
    in which eager would add.
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
        """Return the buffers of one lane, by slot."""
        return [column[lane] for column in self.columns]

    @property
    def folds(self) -> tuple[int, ...]:
        """Instructions that reduce, in order."""
        return tuple(x for x in self.output_code if self.instrs[x].op in REDUCTIONS)


def makes_numbers(v: Variant) -> bool:
    """Does each lane of a variant end in numbers alone, available when the lane is
    done?

    It then folds to one number, or has no elements.
    """
    return v.reduction == "full" or all(s.domain == "lane" for s in v.slots)


@dataclass(frozen=True)
class Kernel:
    """One launch: variants that are proven independent of one another.

    `finish` are variants of few lanes that run after all others. They may read the
    results of lanes of `variants` that make numbers (see `makes_numbers`). `first` are
    variants of few lanes that run before all others, which may read their results. No
    two variants of either depend on each other.
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


#: The (variant, lane) pairs of one block, in order, for each kernel of a run.
Block = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class Run:
    """Kernels of the CPU that go block by block: all of them over the lanes of one
    block, then over those of the next.

    `blocks[i][k]` are the lanes of kernel k in block i; every lane is in one block. No
    kernel has `finish` or `first`, which would need to wait for lanes of all blocks.
    """

    kernels: tuple[Kernel, ...]
    blocks: tuple[Block, ...]

    @property
    def name(self) -> str:
        return "+".join(k.name for k in self.kernels)

    def part(self, block: Block, k: int) -> Kernel:
        """Return kernel k with the lanes of one block; a variant may have none."""
        lanes: dict[int, list[int]] = {}
        for v, lane in block[k]:
            lanes.setdefault(v, []).append(lane)
        kernel = self.kernels[k]
        variants = [_some(x, lanes.get(v, [])) for v, x in enumerate(kernel.variants)]
        return replace(kernel, variants=tuple(variants))


def _some(v: Variant, lanes: list[int]) -> Variant:
    """Return a variant with some of its lanes."""
    return replace(
        v,
        columns=tuple([tuple([c[i] for i in lanes]) for c in v.columns]),
        scalars=tuple([tuple([c[i] for i in lanes]) for c in v.scalars]),
        shapes=tuple([v.shapes[i] for i in lanes]),
        reduced=tuple([v.reduced[i] for i in lanes]) if v.reduced else (),
        operands=tuple([v.operands[i] for i in lanes]) if v.operands else (),
    )


#: The alignment of each storage in an arena, in bytes.
ALIGNED = 64


@dataclass(frozen=True)
class MemoryPlan:
    """Places of a schedule's temps, by storage; other temps are allocated at each call.

    `offsets`: the first byte in the step's arena, which has `size` bytes. Two storages
    may share a place if no block of a run touches both. `returned`: an extern allocates
    and returns it. `loose`: no kernel and no other view reads it, so it keeps the
    strides with which an extern returns it. `freed[i]`: storages that no step reads
    after the step at place i; () if none is freed before the last step ends. `remote`:
    for each accelerator, the first byte and the end of its part of the arena. The CPU's
    part is the last one.
    """

    offsets: dict[int, int] = field(default_factory=dict)
    size: int = 0
    returned: frozenset[int] = frozenset()
    loose: frozenset[int] = frozenset()
    freed: tuple[tuple[int, ...], ...] = ()
    remote: dict[str, tuple[int, int]] = field(default_factory=dict)


#: An entry of a schedule.
Step = Kernel | Run | Extern | Batch


@dataclass(frozen=True)
class Schedule:
    """Kernels and externs in running order, and refusals to fuse.

    `temps`: the temp buffers that need memory. `memory`: where they get it. `stacks`:
    temps that are adjacent. `alone`: products of matrices that no Batch has.
    `branches`: for a series of ATen calls, by the place of its first step, the places
    of the steps of each branch. A device may run branches at one time.
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
        """All kernels, including those of runs, in order."""
        kernels: list[Kernel] = []
        for step in self.steps:
            if not isinstance(step, (Extern, Batch)):
                kernels += step.kernels if isinstance(step, Run) else [step]
        return tuple(kernels)

    @property
    def externs(self) -> tuple[Extern, ...]:
        """All ATen calls of the graph, including rows of batches, in order."""
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
