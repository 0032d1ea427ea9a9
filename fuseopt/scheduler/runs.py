"""Join dependent kernels that may go block by block into runs.

A *strand* is a set of lanes of several kernels, closed under shared written memory.
Usually it is the lanes of one parameter, one of each kernel. So any strand may finish
before another one begins, and the later kernels find its memory in the cache. Some
kernels have lanes that would join many strands (all read a total norm, one reads all
norms). Such a kernel waits for all of them, and begins a new run. Each strand is a
separate block here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ..ir.alias import overlaps
from ..ir.graph import Graph, Kernel, Run, Schedule, Step, Variant
from ..ir.sets import UnionFind
from .passes import Machine, goes_by_blocks

#: The largest number of lanes of one kernel in a strand. More lanes share a common
#: number, and are no strand.
FEW = 8


class _Ties:
    """Lanes of the kernels of a run, and their connections through memory."""

    def __init__(self, near: dict[int, list[int]]) -> None:
        self.near = near
        self.kernels: list[Kernel] = []
        #: kernel, variant, lane of each
        self.lanes: list[tuple[int, int, int]] = []
        self.sets = UnionFind(0)
        self.readers: dict[int, list[int]] = {}
        self.writers: dict[int, list[int]] = {}

    def take(self, kernel: Kernel) -> bool:
        """Append a kernel; return False, unchanged, if it joins too many lanes."""
        lanes, parent = len(self.lanes), list(self.sets.parent)
        reads: list[tuple[int, int]] = []
        writes: list[tuple[int, int]] = []
        for v, variant in enumerate(kernel.variants):
            for lane in range(variant.lanes):
                at = len(self.lanes)
                self.lanes.append((len(self.kernels), v, lane))
                self.sets.parent.append(at)
                for b, written in _touched(variant, lane):
                    (writes if written else reads).append((b, at))
        for b, at in reads:
            self._meet(at, b, self.writers)
        for b, at in writes:
            self._meet(at, b, self.writers)
            self._meet(at, b, self.readers)
        if self._tied():
            del self.lanes[lanes:]
            self.sets.parent = parent
            return False
        # lanes of one kernel do not depend on one another
        for b, at in reads:
            self.readers.setdefault(b, []).append(at)
        for b, at in writes:
            self.writers.setdefault(b, []).append(at)
        self.kernels.append(kernel)
        return True

    def _meet(self, at: int, b: int, others: dict[int, list[int]]) -> None:
        for x in (b, *self.near.get(b, ())):
            for other in others.get(x, ()):
                self.sets.join(at, other)

    def _tied(self) -> bool:
        many: dict[tuple[int, int], int] = {}
        for at, (kernel, _, _) in enumerate(self.lanes):
            key = self.sets.find(at), kernel
            many[key] = many.get(key, 0) + 1
        return any(n > FEW for n in many.values())

    def together(self) -> list[Kernel | Run]:
        """Return a run of the kernels so far, if they are several."""
        if len(self.kernels) < 2:
            return list(self.kernels)
        strands: dict[int, tuple[list[tuple[int, int]], ...]] = {}
        for at, (k, v, lane) in enumerate(self.lanes):
            root = self.sets.find(at)
            if root not in strands:
                strands[root] = tuple([[] for _ in self.kernels])
            strands[root][k].append((v, lane))
        blocks = [tuple(map(tuple, lanes)) for lanes in strands.values()]
        return [Run(tuple(self.kernels), tuple(blocks))]


def _touched(v: Variant, lane: int) -> Iterator[tuple[int, bool]]:
    """Yield the buffers of a lane, with True for a written one."""
    for slot, column in zip(v.slots, v.columns, strict=True):
        yield column[lane], slot.write


def join_runs(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """Join adjacent kernels that may go strand by strand into runs; keep the others."""
    if not goes_by_blocks(graph, schedule, machine) or len(schedule.kernels) < 2:
        return schedule
    steps: list[Step] = []
    beside: list[Kernel] = []
    for step in (*schedule.steps, None):
        if isinstance(step, Kernel):
            beside.append(step)
            continue
        steps += runs(graph, beside) if len(beside) > 1 else beside
        beside = []
        if step is not None:
            steps.append(step)
    if len(steps) == len(schedule.steps):
        return schedule
    return replace(schedule, steps=tuple(steps))


def runs(graph: Graph, kernels: Sequence[Kernel]) -> list[Kernel | Run]:
    """Return adjacent kernels in order, joined into runs where possible."""
    near = overlaps(graph.buffers)
    done: list[Kernel | Run] = []
    ties = _Ties(near)
    for kernel in kernels:
        apart = kernel.finish or kernel.first
        if not apart and ties.take(kernel):
            continue
        done += ties.together()
        ties = _Ties(near)
        if apart or not ties.take(kernel):
            done.append(kernel)  # some of its variants wait for all lanes
    return [*done, *ties.together()]
