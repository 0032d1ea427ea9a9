"""Batches that follow each other: all products of a row in one go, then the next row.

Batches of a chain are joined by their stacks. C makes the products of one row after
another (see chains.py). Stacks that the chain alone touches need no memory then: each
thread has room for one row of them. Batches that nothing joins are separate chains, one
after another. The memory plan keeps what a chain reads or leaves for as long as any of
these batches runs (scheduler/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ..ir.graph import DTYPE_BYTES, Batch, Buffer, Graph, MemoryPlan, Stack, Symbol
from ..ir.graph import Step as ScheduleStep
from ..ir.products import ADDRESSED, MERGED, Operand, chained
from ..scheduler.memory import first_fit, storages_of
from .batches import PreparedBatch
from .chains import Chains, Place, Step, chain_call, in_pool, in_room, step_of
from .memory import Memory
from .tables.host_numbers import CPU
from .tables.words import HelperCall

#: What a matrix in the room of a thread begins at.
ALIGNED = 64


class _Local(NamedTuple):
    """Offsets of stacks in the room of a thread, and its bytes."""

    offsets: Mapping[int, int]
    size: int


class Chain:
    """Batches whose products C makes row by row; `local`: stacks for them alone."""

    def __init__(
        self,
        batches: Sequence[PreparedBatch],
        local: _Local,
        memory: MemoryPlan,
        stacks: Sequence[Stack],
        chains: Chains,
    ) -> None:
        self.batches = batches
        self.local = local
        self.chains = chains
        self.first = [memory.offsets[x.storages[0]] for x in stacks]
        self.stacks = stacks
        numbers = [s for x in batches for s in x.batch.scales]
        self._numbers = any(isinstance(s, Symbol) for s in numbers)
        self._now: tuple[object, ...] | None = None
        places = [x for b in batches for x in b.batch.operands if x.stack == ADDRESSED]
        buffers = batches[0].buffers
        every = dict.fromkeys(b for x in places for b in x.buffers)
        #: the caller's tensors that C finds by their addresses
        self._given = tuple(b for b in every if buffers[b].kind != "temp")
        self._call: Callable[[int], HelperCall] | None = None

    def run(self, memory: Memory) -> None:
        """Make all products, or run the batches one by one."""
        call = self.call(memory)
        if call is None:
            for batch in self.batches:
                batch.run(memory)
        else:
            call()

    def call(self, memory: Memory) -> HelperCall | None:
        """Return the call of C that makes all products; None if it may not."""
        assert memory.arena is not None, "a chain needs the arena of its stacks"
        arena, begin = memory.arena[CPU]
        now = self.batches[0].now(memory)
        scales = [x.scales(memory) for x in self.batches]
        numbers = scales if self._numbers else None
        known = (arena, memory.layout, now, numbers)
        if self._now is None or not _same(self._now, known):
            self._now = self._call = None
            each = zip(self.batches, scales, strict=True)
            if not all(x.may(numbers, now) for x, numbers in each):
                return None
            if not self._as_planned(memory):
                return None
            first = arena.data_ptr() - begin
            self._call = self._prepared(memory, first, scales)
            self._now = known if self.batches[0].keeps else None
        assert self._call is not None, "a chain has its call"
        return self._call(torch.get_num_threads())

    def _as_planned(self, memory: Memory) -> bool:
        """Have the caller's tensors the strides of the plan?"""
        buffers = memory.layout.buffers
        return all(memory.tensor(b).stride() == buffers[b].stride for b in self._given)

    def _prepared(
        self, memory: Memory, base: int, scales: Sequence[Sequence[float]]
    ) -> Callable[[int], HelperCall]:
        steps: list[Step] = []
        size = DTYPE_BYTES[self.batches[0].batch.trial.dtype]
        for prepared, numbers in zip(self.batches, scales, strict=True):
            batch = prepared.batch
            (result,) = batch.results
            places = [self._place(memory, base, x) for x in batch.operands]
            out = self._place(memory, base, result)
            (m, n), k = result.shape[1:], batch.operands[-1].shape[1]
            product = (m, n, k), places, out, numbers, batch.op, size, batch.order
            steps.append(step_of(*product))
        first = self.batches[0]
        rows, local, pool = len(first.batch.externs), self.local.size, memory.words
        return chain_call(self.chains, rows, size, steps, local, pool)

    def _place(self, memory: Memory, base: int, x: Operand) -> Place:
        """Return where an operand is: in the arena, in the room of a thread, or among
        the caller's tensors.
        """
        b = memory.layout.buffers[x.buffers[0]]
        stride = (b.stride[0], b.stride[1])
        if x.stack == ADDRESSED:
            return in_pool([memory.position[i] for i in x.buffers], stride)
        at = self.local.offsets.get(x.stack)
        if at is not None:
            return in_room(at + b.first_byte, stride)
        size = DTYPE_BYTES[b.dtype]
        first = base + self.first[x.stack] + x.first * size
        return Place(first, x.stride[0] * size, stride)


def _same(one: tuple[object, ...], other: tuple[object, ...]) -> bool:
    """Are arena and layout the same objects, and the rest equal?"""
    return one[0] is other[0] and one[1] is other[1] and one[2:] == other[2:]


class ChainedBatches:
    """Batches in a row among the steps, as chains."""

    def __init__(self, parts: Sequence[Chain | PreparedBatch], count: int) -> None:
        self.parts = parts
        self.count = count

    def run(self, memory: Memory) -> int:
        """Run all of them; return how many steps that are."""
        for part in self.parts:
            part.run(memory)
        return self.count

    def calls(self, memory: Memory) -> list[HelperCall] | None:
        """Return calls of C that run all of them; None if there are none."""
        found: list[HelperCall] = []
        for part in self.parts:
            call = part.call(memory) if isinstance(part, Chain) else None
            if call is None:
                return None
            found.append(call)
        return found


def chained_batches(
    graph: Graph,
    steps: Sequence[ScheduleStep],
    batches: Mapping[int, PreparedBatch],
    memory: MemoryPlan,
    stacks: Sequence[Stack],
    chains: Chains | None,
) -> dict[int, ChainedBatches]:
    """Return the chains among steps, by the index of their first step."""
    found: dict[int, ChainedBatches] = {}
    if chains is None:
        return found
    for start, end in chained(steps):
        row = [x for x in steps[start:end] if isinstance(x, Batch)]
        outside = _touched(graph, [*steps[:start], *steps[end:]]) | {
            graph.buffers[b].storage for b in graph.outputs
        }
        parts: list[Chain | PreparedBatch] = []
        for joined in _components(row, graph.buffers):
            for part in _by_rows(joined, graph.buffers):
                prepared = [batches[x.externs[0].payload] for x in part]
                if _goes_by_rows(part, graph.buffers):
                    mine = {id(x) for x in part}
                    others = _touched(graph, [x for x in row if id(x) not in mine])
                    local = _in_room(graph, part, stacks, outside | others)
                    parts.append(Chain(prepared, local, memory, stacks, chains))
                else:
                    parts += prepared
        found[start] = ChainedBatches(parts, end - start)
    return found


def _touched(graph: Graph, steps: Sequence[ScheduleStep]) -> set[int]:
    """Return the storages that steps touch."""
    found: set[int] = set()
    for step in steps:
        found.update(storages_of(graph, step))
    return found


def _components(
    batches: Sequence[Batch], buffers: Sequence[Buffer]
) -> list[list[Batch]]:
    """Return the batches that storages join which one of them writes, each in order."""

    def storages(operands: Iterable[Operand]) -> set[int]:
        return {buffers[b].storage for x in operands for b in x.buffers}

    written = storages(x for batch in batches for x in batch.results)
    groups: list[tuple[set[int], list[Batch]]] = []
    for batch in batches:
        touched = storages((*batch.operands, *batch.results)) & written
        joined = [group for group in groups if group[0] & touched]
        rest = [group for group in groups if not group[0] & touched]
        every = touched.union(*(group[0] for group in joined))
        members = [x for group in joined for x in group[1]]
        groups = [*rest, (every, [*members, batch])]
    order = {id(x): i for i, x in enumerate(batches)}
    return [sorted(members, key=lambda x: order[id(x)]) for _, members in groups]


def _by_rows(
    batches: Sequence[Batch], buffers: Sequence[Buffer]
) -> Iterator[list[Batch]]:
    """Yield batches that go by rows together, as many as possible, in order."""
    part: list[Batch] = []
    for batch in batches:
        if part and not _goes_by_rows([*part, batch], buffers):
            yield part
            part = []
        part.append(batch)
    if part:
        yield part


def _goes_by_rows(batches: Sequence[Batch], buffers: Sequence[Buffer]) -> bool:
    """Does each row of the batches need what the same row makes, and nothing else?"""
    row_of: dict[int, int] = {}
    for batch in batches:
        for x in batch.results:
            row_of.update((buffers[b].storage, i) for i, b in enumerate(x.buffers))
    first = batches[0]
    return all(
        batch.op not in MERGED
        and len(batch.externs) == len(first.externs)
        and batch.trial.dtype == first.trial.dtype
        and all(x.stack >= 0 or x.stack == ADDRESSED for x in batch.operands)
        and all(x.stack >= 0 for x in batch.results)
        and all(
            row_of.get(buffers[b].storage, i) == i
            for x in batch.operands
            for i, b in enumerate(x.buffers)
        )
        for batch in batches
    )


def _in_room(
    graph: Graph, batches: Sequence[Batch], stacks: Sequence[Stack], outside: set[int]
) -> _Local:
    """Return places in the room of a thread for stacks that these batches alone touch.

    A place is used again after the last batch that reads it. Rows that C finds by their
    addresses are not there.
    """
    written = {x.stack for b in batches for x in b.results}
    outside = outside | {
        graph.buffers[b].storage
        for batch in batches
        for x in batch.operands
        if x.stack == ADDRESSED
        for b in x.buffers
    }
    used: dict[int, tuple[int, int]] = {}
    for i, batch in enumerate(batches):
        for x in (*batch.operands, *batch.results):
            if x.stack in written and outside.isdisjoint(stacks[x.stack].storages):
                used[x.stack] = used.get(x.stack, (i, i))[0], i
    offsets, size = first_fit(used, {k: stacks[k].step for k in used}, ALIGNED)
    return _Local(offsets, size)
