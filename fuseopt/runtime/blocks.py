"""Runs of kernels, block by block: each kernel over a block before the next block.

A block is so many strands of a run (scheduler/blocks.py) that what they touch fits a
share of the cache, and at least one strand. What lives within a block alone takes its
place in an arena in which each block begins anew: a step needs memory for the largest
block instead of for all of them, and finds it in the cache.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from ..ir import DTYPE_BYTES, Buffer, Extern, Graph, Kernel
from ..scheduler.blocks import Run, Strand, part, runs
from .batch import Batch, Step
from .memory import Layout, extent, first_byte
from .table import CppTable, TableFactory, TensorLayout

#: Where Linux says how large a cache is, and what is taken where it does not.
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN = 1 << 20
#: The last cache is others' as well: the share of it that a block may take.
SHARE = 4
#: An arena that is larger is given back after each call.
KEPT = 64 << 20
#: A temp that is no larger has memory for good, whoever touches it.
SMALL = 4096
ALIGNED = 64


def cache_bytes(folder: Path = CACHES) -> int:
    """The bytes of the largest cache, or a careful guess."""
    sizes = [UNKNOWN]
    for file in folder.glob("index*/size"):
        try:
            text = file.read_text().strip()
            unit = {"K": 1 << 10, "M": 1 << 20}.get(text[-1:], 1)
            sizes.append(int(text.rstrip("KM")) * unit)
        except (OSError, ValueError):
            continue
    return max(sizes)


#: Bytes that the strands of a block touch together.
BLOCK = cache_bytes() // SHARE

Planned = Step | Run


def in_runs(graph: Graph, steps: Iterable[Step], wanted: bool) -> list[Planned]:
    """The steps of a plan, with kernels that may go block by block as a Run."""
    done: list[Planned] = []
    beside: list[Kernel] = []
    for step in (*steps, None):
        if wanted and isinstance(step, Kernel):
            beside.append(step)
            continue
        done += runs(graph, beside) if len(beside) > 1 else beside
        beside = []
        if step is not None:
            done.append(step)
    return done


def in_blocks(buffers: Sequence[Buffer], run: Run, most: int) -> list[list[Strand]]:
    """The strands of a run, as many in a block as touch `most` bytes, or one."""
    blocks: list[list[Strand]] = []
    filled = 0
    for strand in run.strands:
        touched = [buffers[b] for b in strand.buffers]
        own = sum(b.numel * DTYPE_BYTES[b.dtype] for b in touched)
        if not blocks or filled + own > most:
            blocks.append([])
            filled = 0
        blocks[-1].append(strand)
        filled += own
    return blocks


def _touched(graph: Graph, step: Planned) -> set[int]:
    """The storages that a step touches."""
    if isinstance(step, Extern):
        values = (*step.reads, *step.writes)
        return {graph.buffers[graph.values[v]].storage for v in values}
    if isinstance(step, Batch):
        return {s for member in step.members for s in _touched(graph, member)}
    if isinstance(step, Run):
        return {graph.buffers[b].storage for x in step.strands for b in x.buffers}
    return {
        graph.buffers[b].storage
        for variant in step.every
        for column in variant.columns
        for b in column
    }


class Blocks:
    """The blocks of a plan's runs, and where the temps that kernels alone see lie.

    `offsets`: by storage, where in the arena it begins; `size`: bytes of the arena.
    """

    def __init__(self, graph: Graph, steps: Sequence[Planned], layout: Layout) -> None:
        self.of = {
            step.name: in_blocks(graph.buffers, step, BLOCK)
            for step in steps
            if isinstance(step, Run)
        }
        self.layout = layout
        users: dict[int, list[Planned]] = {}
        for step in steps:
            for s in _touched(graph, step):
                users.setdefault(s, []).append(step)
        seen = {graph.buffers[b].storage for b in graph.outputs} | layout.given
        free = [
            s
            for s, own in users.items()
            if s in layout.members and s not in seen and _kernels(own)
        ]
        self.offsets: dict[int, int] = {}
        self.size = 0
        for s in free:
            if self._bytes(s) <= SMALL:
                self.size = self._place(s, self.size)
        first = self.size
        alone = {s for s in free if len(users[s]) == 1} - self.offsets.keys()
        for blocks in self.of.values():
            for block in blocks:
                at = first
                for strand in block:
                    for s in sorted(strand.apart & alone):
                        at = self._place(s, at)
                self.size = max(self.size, at)
        self.arena: torch.Tensor | None = None
        self.places: list[tuple[int, int]] = []

    def _bytes(self, storage: int) -> int:
        own = [self.layout.buffers[m] for m in self.layout.members[storage]]
        return max(first_byte(x) + extent(x) for x in own)

    def _place(self, storage: int, at: int) -> int:
        self.offsets[storage] = at
        return at + -(-self._bytes(storage) // ALIGNED) * ALIGNED

    def settle(self, position: Mapping[int, int]) -> None:
        """From here on the temps of the arena are nobody else's to allocate."""
        self.places = [
            (position[m], at + first_byte(self.layout.buffers[m]))
            for s, at in self.offsets.items()
            for m in self.layout.members[s]
        ]
        self.layout.placed.update(self.offsets)

    def take(self, pool: array[int]) -> torch.Tensor | None:
        """The memory of a call, whose addresses are in the pool then; to be held until
        the call has ended.
        """
        if not self.places or self.arena is not None:
            return self.arena
        made = torch.empty(self.size, dtype=torch.uint8)
        base = made.data_ptr()
        for position, at in self.places:
            pool[position] = base + at
        if self.size <= KEPT:
            self.arena = made
        return made


def _kernels(steps: Sequence[Planned]) -> bool:
    return all(isinstance(step, (Kernel, Run)) for step in steps)


class RunTable:
    """The tables of a run: of each block, those of each kernel."""

    place: torch.device | None = None

    def __init__(
        self,
        run: Run,
        blocks: Sequence[Sequence[Strand]],
        factories: Mapping[str, TableFactory],
        pool: array[int],
        position: Mapping[int, int],
        layouts: Mapping[int, TensorLayout],
        helper: ctypes.PyDLL | None,
    ) -> None:
        self.tables: list[CppTable] = []
        for block in blocks:
            for k, kernel in enumerate(run.kernels):
                own = part(kernel, [strand.lanes[k] for strand in block])
                if own.lanes:
                    table = factories[kernel.name](own, pool, position, layouts)
                    self.tables.append(cast(CppTable, table))
        self.changing = [t for t in self.tables if t.symbolic]
        self.symbolic = bool(self.changing)
        self.threads = 0
        n = len(self.tables)
        self.entries = (ctypes.c_void_p * n)(
            *(
                ctypes.cast(cast(Any, t.entry), ctypes.c_void_p).value
                for t in self.tables
            )
        )
        self.structs = (ctypes.c_void_p * n)(
            *(ctypes.addressof(t.structs) for t in self.tables)
        )
        self.start: Any = None
        if helper is not None:
            # others may use Python meanwhile
            self.start = ctypes.CDLL(helper._name, handle=helper._handle).fuseopt_blocks
            self.start.argtypes = [
                *(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
            ]
            self.start.restype = None

    def fill_rows(self, numbers: Sequence[float]) -> None:
        """Write the scalars; `numbers` are the values of the step's symbols."""
        for t in self.changing:
            t.fill_rows(numbers)

    def launches(self, threads: int) -> list[Callable[[], object]]:
        """The same as calls of C alone, until the number of threads is another."""
        calls = [call for t in self.tables for call in t.launches(threads)]
        if self.start is None:
            return calls
        self.threads = threads
        every = len(self.tables), self.entries, self.structs, threads
        return [functools.partial(self.start, *every)]

    def launch(self, threads: int) -> None:
        """Run all kernels over a block, then over the next one."""
        if threads != self.threads:
            self.threads = threads
            for t in self.tables:
                t.prepare(threads)
        if self.start is None:
            for t in self.tables:
                t.launch(threads)
            return
        self.start(len(self.tables), self.entries, self.structs, threads)
