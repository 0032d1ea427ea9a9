"""The IR: what a captured optimizer step is, in frozen data without torch.

A `Graph` holds *buffers* (regions of memory), *values* (a version of a buffer, SSA) and
*nodes* in program order. A node is either a `SchedulerNode`, one position of one
recorded call, whose arithmetic is a shared `Body`; or an `Extern`, an ATen call run as
it is.

A `Body` is written once and shared by every lane that runs it: nodes of 1,000 lanes
point to the same object, so checking and generating code costs nothing per lane.

The scheduler turns a Graph into a `Schedule`: kernels made of `Variant`s (one fused
body with the table of its lanes) and externs, in the order in which they run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

#: Element types that a body may compute with, and their size in bytes. "b8" is a bool
#: stored in a byte.
ARITHMETIC = {
    "f64": 8,
    "f32": 4,
    "bf16": 2,
    "f16": 2,
    "i64": 8,
    "i32": 4,
    "i16": 2,
    "i8": 1,
    "u8": 1,
    "b8": 1,
}
#: Element types that only externs read and write: memory of known size, no arithmetic.
OPAQUE = {
    "c128": 16,
    "c64": 8,
    "c32": 4,
    "u64": 8,
    "u32": 4,
    "u16": 2,
    "f8e4m3": 1,
    "f8e4m3z": 1,
    "f8e5m2": 1,
    "f8e5m2z": 1,
    "f8e8m0": 1,
}
#: Size in bytes of every element type that a buffer may have.
DTYPE_BYTES = {**ARITHMETIC, **OPAQUE}
FLOATS = frozenset({"f64", "f32", "bf16", "f16"})

#: Opcodes that take part in a body, with their number of arguments.
ARITY = {
    "load": 0,  # attr: index of the read
    "scalar": 0,  # attr: index of the scalar; a double from the host
    "const": 0,  # attr: a literal that is part of the structure
    "cast": 1,
    "add": 2,
    "sub": 2,
    "mul": 2,
    "div": 2,
    "fma": 3,  # a * b + c, rounded once
    "neg": 1,
    "abs": 1,
    "sqrt": 1,  # rounded correctly
    "vsqrt": 1,  # as eager's vector library rounds it
    "floor": 1,
    "ceil": 1,
    "trunc": 1,
    "round": 1,
    "isnan": 1,
    "max": 2,  # NaN in either argument gives NaN
    "min": 2,
    "lt": 2,
    "le": 2,
    "eq": 2,
    "ne": 2,
    "bitcast": 1,  # the same bits as another type of the same size
    "shl": 2,  # of integers; by no more digits than there are
    "shr": 2,  # copies the sign
    "and": 2,
    "or": 2,
    "xor": 2,
    "not": 1,
    "where": 3,
    # is this element in the part that eager's vector loop leaves over? attr: 1 if asked
    # of elements, 0 if of a single number, which always is; 2, 4, 8 if the loop takes
    # two vectors of elements of so many bytes at a time, else it takes 32 elements;
    # BY_ROWS more if the call's tensors differ in layout, so that it loops over rows
    "tail": 0,
    # over the elements of a lane, or of a row or column of it; attr: NATIVE, FROM_BF16
    # or FROM_F16
    "sum": 1,
    "sumsq": 1,  # of squares, as eager takes a 2-norm
    "fold": 1,  # a sum from the first element to the last
    "largest": 1,  # NaN anywhere gives NaN
    "least": 1,
}
#: Functions, by number of arguments, as C's library gives them.
FUNCTIONS = {
    **dict.fromkeys(
        (
            "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh "
            "tanh asinh acosh atanh erf erfc lgamma"
        ).split(),
        1,
    ),
    **dict.fromkeys("pow atan2 hypot fmod nextafter".split(), 2),
}
#: Those that the library of the processor's vendor has.
VENDOR = tuple("exp log log2 log10 sin cos tan tanh asin acos atan erf erfc".split())
#: The same functions in the bits of libraries that eager calls for many elements at
#: once, on a CPU: "v" those of the processor's vendor, "sleef_" those of Sleef.
VECTOR = {
    **{f"v{name}": name for name in VENDOR},
    **{
        f"sleef_{name}": name
        for name in FUNCTIONS
        if name not in ("asinh", "acosh", "nextafter")
    },
}
ARITY.update(FUNCTIONS)
ARITY.update({name: FUNCTIONS[plain] for name, plain in VECTOR.items()})
BY_ROWS = 16
#: Instructions that make one number of many elements; what reads them runs when the
#: elements are done.
REDUCTIONS = frozenset({"sum", "sumsq", "fold", "largest", "least"})
#: Which numbers eager's loops load when they fold: those that are folded, or numbers
#: of 16 bits that they widen themselves.
NATIVE, FROM_BF16, FROM_F16 = 0, 1, 2


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
    """A scalar computed on the host at each call: `expr` indexes the scalar program."""

    expr: int


ScalarRef = Literal | Symbol


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
        n = 1
        for s in self.shape:
            n *= s
        return n


def kept(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that is left when `dims` are reduced away."""
    return tuple([n for d, n in enumerate(shape) if d not in dims])


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


Node = SchedulerNode | Extern


@dataclass(frozen=True)
class Graph:
    """A captured step. `values[v]` is the buffer of value v.

    `initial[b]` is the value a buffer holds on entry (-1 for temps; a view made after
    its memory was written has one that nobody reads); `final[b]` the value its memory
    must hold at the end (-1 where nobody looks). `outputs` are the buffers the step
    returns.
    """

    buffers: tuple[Buffer, ...]
    values: tuple[int, ...]
    nodes: tuple[Node, ...]
    initial: tuple[int, ...]
    final: tuple[int, ...]
    outputs: tuple[int, ...]


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
    """Why two nodes were not fused: the rule's code and what it saw."""

    producer: str
    consumer: str
    code: str
    detail: str


@dataclass(frozen=True)
class ForeachSchedulerNode:
    """One recorded operation over its lanes, before fusion: the position of a list.

    `reads`, `writes` and `scalars` are columns: entry i belongs to lane i.
    """

    name: str
    body: Body
    reads: tuple[tuple[int, ...], ...]
    scalars: tuple[tuple[ScalarRef, ...], ...]
    writes: tuple[tuple[int, ...], ...]
    line: str

    @property
    def lanes(self) -> int:
        columns = self.writes or self.reads
        return len(columns[0]) if columns else 0


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


@dataclass(frozen=True)
class Schedule:
    """What runs, in order, and what did not fuse and why."""

    steps: tuple[Kernel | Extern, ...]
    refusals: tuple[Refusal, ...] = ()
    temps: tuple[int, ...] = ()  # temp buffers that need memory
    foreach: tuple[ForeachSchedulerNode, ...] = field(default=(), repr=False)
