"""Finish numbers of many lanes in the launch that makes them, once all lanes are done.

Such results are a total norm, the largest of all, or a flag. A variant moves from a
kernel to the end of the previous one on its device if it works on few numbers. All
memory that it shares with that kernel must belong to lanes that make numbers. Only for
those can a launch detect that they are done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ..ir.alias import overlaps
from ..ir.graph import (
    Batch,
    Extern,
    Graph,
    Kernel,
    Run,
    Schedule,
    Variant,
    makes_numbers,
)
from .kernels import needed_temps
from .passes import Machine, kernel_device

#: The largest number of lanes of a variant that runs after all others, in one program.
FEW = 8

Steps = list[Kernel | Extern]


class Touched:
    """Buffers that a step reads and writes."""

    def __init__(self, reads: Iterable[int], writes: Iterable[int]) -> None:
        self.reads = frozenset(reads)
        self.writes = frozenset(writes)

    @classmethod
    def by(cls, variants: Iterable[Variant]) -> Touched:
        reads: set[int] = set()
        writes: set[int] = set()
        for v in variants:
            for slot, column in zip(v.slots, v.columns, strict=True):
                reads.update(column if slot.read else ())
                writes.update(column if slot.write else ())
        return cls(reads, writes)

    def meets(self, other: Touched, near: dict[int, list[int]]) -> bool:
        """Does either write memory that the other touches?"""
        return self._spoils(other, near) or other._spoils(self, near)

    def _spoils(self, other: Touched, near: dict[int, list[int]]) -> bool:
        touched = other.reads | other.writes
        return any(
            b in touched or any(x in touched for x in near.get(b, ()))
            for b in self.writes
        )


def finish_early(graph: Graph, schedule: Schedule, _: Machine) -> Schedule:
    """Move the nodes that finish a kernel's numbers into it; drop empty kernels."""
    steps: Steps = []
    for s in schedule.steps:
        assert not isinstance(s, (Run, Batch)), "these are made of what is finished"
        steps.append(s)
    if not any(_makes_numbers(s) for s in steps):
        return schedule
    near = overlaps(graph.buffers)
    done: Steps = []
    anything = False
    for step in steps:
        if isinstance(step, Extern):
            done.append(step)
            continue
        before = _kernel_before(graph, done, step)
        moved: list[Variant] = []
        if before is not None:
            kernel, passed = done[before], between(graph, done[before + 1 :])
            assert isinstance(kernel, Kernel)
            moved = [v for v in step.variants if _may(graph, v, kernel, passed, near)]
            done[before] = replace(kernel, finish=(*kernel.finish, *moved))
            anything |= bool(moved)
        gone = set(map(id, moved))
        left = tuple([v for v in step.variants if id(v) not in gone])
        if left:
            done.append(replace(step, variants=left) if moved else step)
    if not anything:
        return schedule
    return numbered(graph, schedule, done)


def numbered(graph: Graph, schedule: Schedule, steps: Steps) -> Schedule:
    """Return the schedule of these steps, with new names of kernels."""
    names = (f"kernel{k}" for k in range(len(steps)))
    named = [
        replace(s, name=next(names)) if isinstance(s, Kernel) else s for s in steps
    ]
    return replace(schedule, steps=tuple(named), temps=needed_temps(graph, named))


def _makes_numbers(step: Kernel | Extern) -> bool:
    return isinstance(step, Kernel) and any(
        v.reduction == "full" for v in step.variants
    )


def _kernel_before(
    graph: Graph, done: Sequence[Kernel | Extern], k: Kernel
) -> int | None:
    """Return the last kernel on the device of `k`, if it makes numbers."""
    device = kernel_device(graph, k)
    for at in reversed(range(len(done))):
        step = done[at]
        if isinstance(step, Kernel) and kernel_device(graph, step) == device:
            return at if _makes_numbers(step) else None
    return None


def between(graph: Graph, steps: Sequence[Kernel | Extern]) -> Touched:
    """Return the buffers that some steps touch."""

    def reads(step: Kernel | Extern) -> Iterator[int]:
        if isinstance(step, Extern):
            yield from (graph.values[v] for v in step.reads)
        else:
            yield from Touched.by(step.every).reads

    def writes(step: Kernel | Extern) -> Iterator[int]:
        if isinstance(step, Extern):
            yield from (graph.values[v] for v in step.writes)
        else:
            yield from Touched.by(step.every).writes

    return Touched(
        (b for s in steps for b in reads(s)), (b for s in steps for b in writes(s))
    )


def _may(
    graph: Graph,
    v: Variant,
    kernel: Kernel,
    passed: Touched,
    near: dict[int, list[int]],
) -> bool:
    """May variant `v` run at the end of `kernel`, before the steps it has `passed`?"""
    if v.lanes > FEW or v.reduction == "dims":
        return False
    touched = Touched.by([v])
    counted = [x for x in kernel.variants if makes_numbers(x)]
    numbers = frozenset(
        b for b in Touched.by(counted).writes if graph.buffers[b].numel == 1
    )
    for s, slot in enumerate(v.slots):
        if slot.domain != "element":
            continue
        for b in v.columns[s]:
            if slot.read and not numbers.intersection(near.get(b, ())):
                return False  # its elements are not numbers of those lanes
            if slot.write and graph.buffers[b].numel > len(numbers):
                return False
    if not touched.meets(Touched.by(counted), near):
        return False  # it depends on another step
    rest = [x for x in kernel.variants if not makes_numbers(x)]
    others = Touched.by([*rest, *kernel.finish])
    return not touched.meets(others, near) and not touched.meets(passed, near)
