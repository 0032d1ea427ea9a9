"""Schedule -> the same with branches: calls of a device that may run at one time.

Between two kernels, calls that depend on each other form a *branch*. Branches share no
memory that one of them writes, so a captured graph has them beside each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir.alias import overlaps
from ..ir.graph import (
    Batch,
    Buffer,
    Extern,
    Graph,
    Schedule,
    Step,
    storage_bytes,
)
from ..ir.sets import UnionFind
from .dependencies import CPU
from .levels import in_levels
from .passes import Machine


def branch_out(graph: Graph, schedule: Schedule, machine: Machine) -> Schedule:
    """Find the branches of each series of calls that has several."""
    buffers, values = graph.buffers, graph.values
    devices = {
        buffers[values[v]].device
        for e in schedule.externs
        for v in (*e.reads, *e.writes)
    }
    if len(devices) != 1 or CPU in devices:
        return schedule
    near = overlaps(buffers)
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    start = 0
    while start < len(schedule.steps):
        end = start
        while end < len(schedule.steps) and _calls(schedule.steps[end]):
            end += 1
        if end - start > 1:
            branches = _of_series(graph, schedule, start, end, near)
            if len(branches) > 1:
                found[start] = branches
        start = max(end, start + 1)
    return replace(schedule, branches=found) if found else schedule


def _calls(step: Step) -> bool:
    return isinstance(step, (Extern, Batch))


def _rows(step: Step) -> tuple[Extern, ...]:
    assert isinstance(step, (Extern, Batch))
    return step.externs if isinstance(step, Batch) else (step,)


def _of_series(
    graph: Graph,
    schedule: Schedule,
    start: int,
    end: int,
    near: Mapping[int, Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    """The branches of the calls from one step to before another."""
    series = schedule.steps[start:end]
    externs: list[Extern] = []
    owner: list[int] = []
    for i, step in enumerate(series):
        externs += _rows(step)
        owner += [i] * len(_rows(step))
    branches = UnionFind(len(series))
    for i, needs in enumerate(in_levels(graph, externs, near).needs):
        for k in needs:
            branches.join(owner[i], owner[k])
    # what has one place in the arena after another must not be there at one time
    end_of, last = -1, 0
    for at, to, i in sorted(_places(graph, schedule, series)):
        if at < end_of:
            branches.join(i, last)
        if to > end_of:
            end_of, last = to, i
    members: dict[int, list[int]] = {}
    for i in range(len(series)):
        members.setdefault(branches.find(i), []).append(start + i)
    return tuple(map(tuple, members.values()))


def _places(
    graph: Graph, schedule: Schedule, series: Sequence[Step]
) -> list[tuple[int, int, int]]:
    """Return the places of a series in the arena: first byte, end, step."""
    offsets = schedule.memory.offsets
    members: dict[int, list[Buffer]] = {}
    for b in graph.buffers:
        if b.storage in offsets:
            members.setdefault(b.storage, []).append(b)
    places: list[tuple[int, int, int]] = []
    for i, step in enumerate(series):
        for e in _rows(step):
            for v in (*e.reads, *e.writes):
                s = graph.buffers[graph.values[v]].storage
                if s in offsets:
                    at = offsets[s]
                    places.append((at, at + storage_bytes(members[s]), i))
    return places
