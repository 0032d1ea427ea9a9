"""Reference interpreter: run a Graph or a Schedule with torch on real CPU tensors.

`run_graph` executes a Graph row by row. `run_schedule` executes a Schedule kernel by
kernel and lane by lane. Both work in place, as the step does, and evaluate instructions
with the same few lines (meaning.py). So `run_graph(g) == run_schedule(g, schedule(g))`
is the oracle of every pass. The code is slow and plain on purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from ..errors import GraphError
from .blocks import write_by_block
from .graph import (
    DTYPE_BYTES,
    Batch,
    Buffer,
    Extern,
    Graph,
    Kernel,
    MemoryPlan,
    Run,
    ScalarRef,
    Schedule,
    Symbol,
    Variant,
    kept,
    rows_of,
)
from .meaning import DTYPES, evaluate


def run_graph(
    graph: Graph,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    externs: ExternRunner | None = None,
    *,
    tail: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Run a Graph as captured, row by row; return its outputs.

    `tensors[b.source]` is the memory of each static or arg buffer b, written in place.
    `scalars[i]` is the value of Symbol i. `externs` runs an ATen call. `tail`: the
    value of tail instructions.
    """
    memory = Memory(graph, tensors)
    for node in chain.from_iterable(map(rows_of, graph.nodes)):
        if isinstance(node, Extern):
            _run_extern(node, memory, externs)
            continue
        loads = [memory.load(graph.values[v]) for v in node.reads]
        numbers = [_number(ref, scalars) for ref in node.scalars]
        whole = node.dims or write_by_block(node.body, 0)
        v = node.reads[0] if whole else node.writes[0]
        space = graph.buffers[graph.values[v]].shape
        results = evaluate(node.body.instrs, loads, numbers, tail, node.dims, space)
        for v, (x, _) in zip(node.writes, node.body.writes, strict=True):
            memory.store(graph.values[v], results[x])
    return tuple(memory.tensor(b) for b in graph.outputs)


def run_schedule(
    graph: Graph,
    schedule: Schedule,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[float] = (),
    externs: ExternRunner | None = None,
    *,
    tail: bool = False,
    backwards: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Run a Schedule of `graph`, lane by lane; else as `run_graph`.

    `backwards` runs a kernel's lanes in reverse order, which must not change any bit.
    """
    memory = Memory(graph, tensors, schedule.memory)
    for step in schedule.steps:
        if isinstance(step, (Extern, Batch)):
            for extern in step.externs if isinstance(step, Batch) else (step,):
                _run_extern(extern, memory, externs)
        elif isinstance(step, Run):
            for block in step.blocks:
                for k in range(len(step.kernels)):
                    part = step.part(block, k)
                    _run_kernel(part, memory, scalars, tail, backwards)
        else:
            _run_kernel(step, memory, scalars, tail, backwards)
    return tuple(memory.tensor(b) for b in graph.outputs)


def _run_kernel(
    kernel: Kernel,
    memory: Memory,
    scalars: Sequence[float],
    tail: bool,
    backwards: bool,
) -> None:
    for variants in (kernel.first, kernel.variants, kernel.finish):
        lanes = [(v, lane) for v in variants for lane in range(v.lanes)]
        for v, lane in reversed(lanes) if backwards else lanes:
            _run_lane(v, lane, memory, scalars, tail)


def _run_lane(
    v: Variant, lane: int, memory: Memory, scalars: Sequence[float], tail: bool
) -> None:
    loads = [
        memory.load(column[lane]) if slot.read else None
        for slot, column in zip(v.slots, v.columns, strict=True)
    ]
    dims = v.reduced[lane] if v.reduced else ()
    if dims:
        left = kept(v.shapes[lane], dims)
        for s, slot in enumerate(v.slots):
            load = loads[s]
            if slot.domain == "output" and load is not None:
                loads[s] = load.reshape(left if load.numel() > 1 else ())
            elif slot.domain == "element" and load is not None:
                loads[s] = load.expand(v.shapes[lane])
    numbers = [_number(column[lane], scalars) for column in v.scalars]
    results = evaluate(v.instrs, loads, numbers, tail, dims, v.shapes[lane])
    for x, s in v.stores:
        memory.store(v.columns[s][lane], results[x])


# ---------------------------------------------------------------- memory


class Memory:
    """Tensors of a run, by buffer. Memory that was never written holds NaN.

    `plan`: the temps that share an arena.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Sequence[torch.Tensor],
        plan: MemoryPlan | None = None,
    ) -> None:
        self.graph = graph
        self._places = {} if plan is None else plan.offsets
        size = 0 if plan is None else plan.size
        self._arena = torch.full((size,), 0xFF, dtype=torch.uint8)
        self._tensors: dict[int, torch.Tensor] = {}
        self._bases: dict[int, tuple[torch.Tensor, int]] = {}  # storage -> tensor, byte
        for b, buffer in enumerate(graph.buffers):
            if buffer.kind in ("static", "arg"):
                tensor = tensors[buffer.source].detach()
                self._tensors[b] = tensor
                first = buffer.offset * DTYPE_BYTES[buffer.dtype]
                self._bases.setdefault(buffer.storage, (tensor, first))

    def tensor(self, b: int) -> torch.Tensor:
        """Return the memory of buffer b, allocated on first use."""
        if b not in self._tensors:
            self._tensors[b] = self._view(self.graph.buffers[b])
        return self._tensors[b]

    def adopt(self, b: int, tensor: torch.Tensor) -> None:
        """Set the memory of temp b to a tensor that an extern returned."""
        self._tensors[b] = tensor
        buffer = self.graph.buffers[b]
        first = buffer.offset * DTYPE_BYTES[buffer.dtype]
        self._bases[buffer.storage] = (tensor, first)

    def load(self, b: int) -> torch.Tensor:
        """Copy the contents of buffer b into a contiguous tensor."""
        return self.tensor(b).clone(memory_format=torch.contiguous_format)

    def store(self, b: int, value: torch.Tensor) -> None:
        """Write `value`, whose dtype is b's, to every element of b."""
        place = self.tensor(b)
        if value.dtype != place.dtype:
            name = self.graph.buffers[b].name
            raise GraphError(f"{value.dtype} is stored to {name}, a {place.dtype}")
        # a reduction's result may keep the reduced dimensions or not
        alike = value.numel() == place.numel()
        place.copy_(value.reshape(place.shape) if alike else value)

    def _view(self, buffer: Buffer) -> torch.Tensor:
        base, first = self._bases.get(buffer.storage) or self._allocate(buffer.storage)
        size = DTYPE_BYTES[buffer.dtype]
        start = base.storage_offset() * base.element_size()
        start += buffer.offset * size - first
        view = torch.empty(0, dtype=DTYPES[buffer.dtype])
        storage = base.untyped_storage()
        return view.set_(storage, start // size, buffer.shape, buffer.stride)

    def _allocate(self, storage: int) -> tuple[torch.Tensor, int]:
        if storage in self._places:
            self._bases[storage] = (self._arena, -self._places[storage])
            return self._bases[storage]
        size = 0
        for b in self.graph.buffers:
            if b.storage == storage and 0 not in b.shape:
                steps = zip(b.shape, b.stride, strict=True)
                last = b.offset + sum((n - 1) * s for n, s in steps)
                size = max(size, (last + 1) * DTYPE_BYTES[b.dtype])
        self._bases[storage] = (torch.full((size,), 0xFF, dtype=torch.uint8), 0)
        return self._bases[storage]


#: Runs the ATen call of an Extern: reads and writes `memory.tensor(...)`, and passes
#: new tensors to `memory.adopt(...)`.
ExternRunner = Callable[[Extern, Memory], None]


def _run_extern(node: Extern, memory: Memory, externs: ExternRunner | None) -> None:
    if externs is None:
        raise GraphError(f"extern {node.name}: the interpreter was given no externs")
    externs(node, memory)


def _number(ref: ScalarRef, scalars: Sequence[float]) -> float:
    return float(scalars[ref.expr]) if isinstance(ref, Symbol) else ref.value
