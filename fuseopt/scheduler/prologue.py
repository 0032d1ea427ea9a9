"""Compute numbers that all lanes of a launch need at the beginning of that launch.

The numbers are made of few others, such as a total of norms that processes have summed.
A kernel becomes the beginning of the next one on its device if it makes only numbers,
from little memory that no other kernel reads. No step in between may need them. All
lanes then wait for it; in C++, threads of a launch can do so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir.alias import overlaps
from ..ir.geometry import numel
from ..ir.graph import Batch, Extern, Graph, Kernel, Run, Schedule, makes_numbers
from .dependencies import CPU
from .epilogue import Touched, between, numbered
from .passes import Machine, kernel_device

#: The largest number of elements of such a kernel. (Numbers that belong to one lane
#: each, such as a bias correction, are as many as the lanes.)
SMALL = 1 << 14


def begin_late(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """Move kernels to the beginning of the kernels that need their numbers."""
    if not machine.block_bytes or len(schedule.kernels) < 2:
        return schedule
    steps: list[Kernel | Extern] = []
    for s in schedule.steps:
        assert not isinstance(s, (Run, Batch)), "these are made of what has begun"
        steps.append(s)
    near = overlaps(graph.buffers)
    done: list[Kernel | Extern] = []
    for at, step in enumerate(steps):
        if isinstance(step, Kernel) and _is_small(graph, step):
            into = _kernel_behind(graph, steps, at)
            if into is not None and _may(graph, steps, at, into, near):
                kernel = steps[into]
                assert isinstance(kernel, Kernel)
                steps[into] = replace(kernel, first=(*kernel.first, *step.variants))
                continue
        done.append(step)
    if len(done) == len(steps):
        return schedule
    return numbered(graph, schedule, done)


def _is_small(graph: Graph, kernel: Kernel) -> bool:
    """Does a CPU kernel only make numbers, from few others?"""
    folded = [v for v in kernel.variants if v.reduction]
    return (
        not (kernel.finish or kernel.first)
        and kernel_device(graph, kernel) == CPU
        and all(map(makes_numbers, kernel.variants))
        and sum(sum(map(numel, v.shapes)) for v in folded) <= SMALL
    )


def _kernel_behind(
    graph: Graph, steps: Sequence[Kernel | Extern], at: int
) -> int | None:
    """Return the index of the next CPU kernel, or None."""
    for k in range(at + 1, len(steps)):
        step = steps[k]
        if isinstance(step, Kernel) and kernel_device(graph, step) == CPU:
            return k
    return None


def _may(
    graph: Graph,
    steps: Sequence[Kernel | Extern],
    at: int,
    into: int,
    near: dict[int, list[int]],
) -> bool:
    """May the whole kernel at `at` wait until the one at `into` begins?"""
    kernel = steps[at]
    assert isinstance(kernel, Kernel)
    touched = Touched.by(kernel.variants)
    if touched.meets(between(graph, steps[at + 1 : into]), near):
        return False
    others = [s for k, s in enumerate(steps) if k != at and isinstance(s, Kernel)]
    seen = Touched.by(v for s in others for v in s.every)
    # if another kernel reads the memory anyway, folding belongs there
    elements = {
        b
        for v in kernel.variants
        for slot, column in zip(v.slots, v.columns, strict=True)
        if slot.domain == "element"
        for b in column
    }
    return not any(x in seen.reads for b in elements for x in (b, *near.get(b, ())))
