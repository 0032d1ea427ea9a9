"""Make the first Schedule of a Graph: one kernel for each stage and device.

    dead rows -> alignment -> dependencies -> numbers shared by lanes -> stages ->
    lanes -> groups -> fused variants

All variants of a stage on one device become one kernel. They are independent, since two
nodes of a stage that touch the same memory are in one lane (horizontal fusion). The CPU
kernel comes first: kernels of other devices may read its results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.alias import shared_storages
from ..ir.graph import (
    Batch,
    Extern,
    Graph,
    Kernel,
    Run,
    Schedule,
    SchedulerNode,
    Step,
    Variant,
    read_by,
    written_by,
)
from .alignment import Aligned, align
from .dead_rows import without_dead_rows
from .dependencies import CPU, Stages, device, edges
from .fusion import fuse
from .grouping import (
    LaneTable,
    SharedNumbers,
    describe_lanes,
    lanes_of_stage,
    shared_numbers,
)
from .recompute import recomputed
from .stages import stages


def _kept_values(
    aligned: Aligned, lane_of: dict[int, int], clones: frozenset[int]
) -> frozenset[int]:
    """Return values that must reach memory: final ones, and those read outside their
    lane.

    For the latter only those of first rows.
    """
    graph, first, values = aligned.graph, aligned.first, aligned.graph.values
    producer = {v: i for i, n in enumerate(first) for v in n.writes}
    kept = {v for v in graph.final if v >= 0}
    seen = _seen_in_parts(graph)
    for i, node in enumerate(first):
        for v in node.reads:
            p = producer.get(v)
            if p is None or p in clones:
                continue
            if isinstance(node, Extern) or lane_of.get(p) != lane_of.get(i):
                kept.add(v)
        for v in node.writes if seen else ():
            if graph.buffers[values[v]].storage in seen:
                kept.add(v)
    return frozenset(kept)


def _seen_in_parts(graph: Graph) -> set[int]:
    """Return storages of several buffers that the caller or a node uses.

    A view that is never used is no second buffer.
    """
    shared = shared_storages(graph.buffers)
    if not shared:
        return set()
    read = {graph.values[v] for n in graph.nodes for v in read_by(n)}
    touched = read | {graph.values[v] for n in graph.nodes for v in written_by(n)}
    several: dict[int, int] = {}
    looked_at: set[int] = set()
    for k, (b, v) in enumerate(zip(graph.buffers, graph.final, strict=True)):
        if b.storage in shared:
            exists_outside = b.kind != "temp" or v >= 0
            several[b.storage] = several.get(b.storage, 0) + (
                k in touched or exists_outside
            )
            if exists_outside or k in read:
                looked_at.add(b.storage)
    return {s for s in looked_at if several[s] > 1}


def _planned(
    graph: Graph, passed: Callable[[str], None]
) -> tuple[Aligned, SharedNumbers, Stages]:
    """Return lanes, the numbers that they share, and the stage of each node."""
    tied: frozenset[int] = frozenset()
    while True:
        aligned = align(graph, tied)
        passed("alignment")
        every_edge = list(edges(aligned))
        passed("dependencies")
        numbers = shared_numbers(aligned, every_edge)
        # clones are computed at each use, so nothing waits for them
        all_edges = [
            e
            for e in every_edge
            if e.producer not in numbers.clones and e.consumer not in numbers.clones
        ]
        plan = stages(aligned, all_edges, numbers)
        passed("stages")
        # one node and each row of another in one kernel: all these rows are one lane
        uneven = {
            e.buffer
            for e in plan.fused
            if aligned.rows(e.producer) != aligned.rows(e.consumer)
        }
        if not uneven:
            return aligned, numbers, plan
        tied |= uneven


def schedule_kernels(graph: Graph, passed: Callable[[str], None]) -> Schedule:
    """Fuse a captured step into as few kernels as the rules of fusion allow.

    `passed(name)` is called when a part of that is done.
    """
    graph = without_dead_rows(graph)
    passed("dead rows")
    aligned, numbers, plan = _planned(graph, passed)
    first = aligned.first
    producer = {v: i for i, n in enumerate(first) for v in n.writes}

    by_stage: dict[int, list[int]] = {}
    externs: dict[int, list[int]] = {}
    for i, node in enumerate(first):
        kind = externs if isinstance(node, Extern) else by_stage
        kind.setdefault(plan.stage[i], []).append(i)
    lanes: dict[int, list[list[int]]] = {}
    lane_of: dict[int, int] = {}
    for s, members in by_stage.items():
        lanes[s] = lanes_of_stage(members, plan.fused, numbers.clones)
        for lane in lanes[s]:
            number = len(lane_of)
            lane_of.update(dict.fromkeys(lane, number))
    kept = _kept_values(aligned, lane_of, numbers.clones)
    again = recomputed(aligned, plan, lane_of, kept, numbers.clones)
    clones = numbers.clones | again
    if again:
        kept = _kept_values(aligned, lane_of, clones)
    passed("lanes")

    steps: list[Step] = []
    last = max([*by_stage, *externs], default=-1)
    for s in range(-1, last + 1):
        groups: dict[tuple[str, tuple[object, ...]], list[LaneTable]] = {}
        for lane in lanes.get(s, ()):
            table = describe_lanes(aligned, lane, producer, kept, clones, plan.late)
            if not table.stores:
                continue
            node = first[lane[0]]
            assert isinstance(node, SchedulerNode)
            groups.setdefault((device(graph, node), table.form), []).append(table)
        by_device: dict[str, list[Variant]] = {}
        for (where, _), group in groups.items():
            by_device.setdefault(where, []).append(fuse(aligned, group, plan.late))
        for where in sorted(by_device, key=lambda device: device != CPU):
            variants = by_device[where]
            # an order that is independent of the order of parameters
            variants.sort(key=lambda v: (v.reduction, v.instrs, v.stores, v.slots))
            name = f"kernel{sum(isinstance(x, Kernel) for x in steps)}"
            steps.append(Kernel(name, tuple(variants)))
        for i in externs.get(s, ()):
            extern = first[i]
            assert isinstance(extern, Extern)
            steps.append(extern)
    return Schedule(tuple(steps), plan.refusals, needed_temps(graph, steps))


def needed_temps(graph: Graph, steps: Sequence[Step]) -> tuple[int, ...]:
    """Return temp buffers that a step or the caller touches in memory, in order."""
    touched: dict[int, None] = dict.fromkeys(graph.outputs)
    for step in steps:
        if isinstance(step, (Extern, Batch)):
            touched.update((graph.values[v], None) for v in step.reads)
            continue
        for kernel in step.kernels if isinstance(step, Run) else (step,):
            for v in kernel.every:
                for column in v.columns:
                    touched.update(dict.fromkeys(column))
    return tuple(b for b in touched if graph.buffers[b].kind == "temp")
