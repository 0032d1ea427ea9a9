"""Graph -> the first Schedule: one kernel for each stage and device.

    dependencies -> numbers shared by lanes -> stages -> lanes -> groups ->
    fused variants

All variants of a stage on one device become one kernel: they are independent, since two
nodes of a stage that touch the same memory are in one lane (horizontal fusion). The
kernel of the CPU comes first: those of other devices may read what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir.graph import (
    Extern,
    Graph,
    Kernel,
    Run,
    Schedule,
    SchedulerNode,
    Step,
    Variant,
)
from .dependencies import CPU, device, edges
from .fusion import fuse
from .grouping import LaneTable, describe_lane, lanes_of_stage, shared_numbers
from .isomorphic import alike
from .stages import stages


def _kept_values(
    graph: Graph,
    stage: tuple[int, ...],
    lane_of: dict[int, int],
    clones: frozenset[int],
) -> frozenset[int]:
    """Values that must reach memory: final ones, and those read outside their lane."""
    producer = {v: i for i, n in enumerate(graph.nodes) for v in n.writes}
    kept = {v for v in graph.final if v >= 0}
    several: dict[int, int] = {}
    looked_at: set[int] = set()  # storages that somebody sees: the caller, or a node
    touched = {graph.values[v] for n in graph.nodes for v in (*n.reads, *n.writes)}
    for k, (b, v) in enumerate(zip(graph.buffers, graph.final, strict=True)):
        # a view that nobody looks through is no second buffer
        if k in touched or b.kind != "temp" or v >= 0:
            several[b.storage] = several.get(b.storage, 0) + 1
        if b.kind != "temp" or v >= 0:
            looked_at.add(b.storage)
    for node in graph.nodes:
        looked_at.update(graph.buffers[graph.values[v]].storage for v in node.reads)
    for i, node in enumerate(graph.nodes):
        for v in node.reads:
            p = producer.get(v)
            if p is None or p in clones:
                continue
            if isinstance(node, Extern) or lane_of.get(p) != lane_of.get(i):
                kept.add(v)
        for v in node.writes:
            storage = graph.buffers[graph.values[v]].storage
            if several[storage] > 1 and storage in looked_at:
                kept.add(v)
    return frozenset(kept)


def schedule_kernels(graph: Graph, passed: Callable[[str], None]) -> Schedule:
    """Fuse a captured step into as few kernels as the rules of fusion allow.

    `passed(name)` is called when a part of that is done.
    """
    parts = alike(graph)
    whole, graph = graph, parts.graph
    passed("islands")
    every_edge = list(edges(graph))
    passed("dependencies")
    numbers = shared_numbers(graph, every_edge)
    # clones are computed wherever they are used, so nothing waits for them
    all_edges = [
        e
        for e in every_edge
        if e.producer not in numbers.clones and e.consumer not in numbers.clones
    ]
    plan = stages(graph, all_edges, numbers)
    passed("stages")
    producer = {v: i for i, n in enumerate(graph.nodes) for v in n.writes}

    by_stage: dict[int, list[int]] = {}
    externs: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        kind = externs if isinstance(node, Extern) else by_stage
        kind.setdefault(plan.stage[i], []).append(i)
    lanes: dict[int, list[list[int]]] = {}
    lane_of: dict[int, int] = {}
    for s, members in by_stage.items():
        lanes[s] = lanes_of_stage(graph, members, plan.fused, numbers.clones)
        for lane in lanes[s]:
            number = len(lane_of)
            lane_of.update(dict.fromkeys(lane, number))
    kept = _kept_values(graph, plan.stage, lane_of, numbers.clones)
    passed("lanes")

    steps: list[Step] = []
    late = frozenset(parts.everywhere(sorted(plan.late)))
    last = max([*by_stage, *externs], default=-1)
    for s in range(-1, last + 1):
        rows: list[tuple[int, str, LaneTable]] = []
        for lane in lanes.get(s, ()):
            table = describe_lane(
                graph, lane, producer, kept, numbers.clones, plan.late
            )
            if not table.stores:
                continue
            node = graph.nodes[lane[0]]
            assert isinstance(node, SchedulerNode)
            where = device(graph, node)
            rows += ((first, where, t) for first, t in parts.spread(lane, table))
        rows.sort(key=lambda row: row[0])
        groups: dict[tuple[str, tuple[object, ...]], list[LaneTable]] = {}
        for _, where, table in rows:
            groups.setdefault((where, table.form), []).append(table)
        by_device: dict[str, list[Variant]] = {}
        for (where, _), group in groups.items():
            by_device.setdefault(where, []).append(fuse(whole, group, late))
        for where in sorted(by_device, key=lambda device: device != CPU):
            variants = by_device[where]
            # an order that does not depend on which parameter came first
            variants.sort(key=lambda v: (v.reduction, v.instrs, v.stores, v.slots))
            name = f"kernel{sum(isinstance(x, Kernel) for x in steps)}"
            steps.append(Kernel(name, tuple(variants)))
        for i in externs.get(s, ()):
            extern = graph.nodes[i]
            assert isinstance(extern, Extern)
            steps.append(extern)
    return Schedule(tuple(steps), plan.refusals, needed_temps(whole, steps))


def needed_temps(graph: Graph, steps: Sequence[Step]) -> tuple[int, ...]:
    """Temp buffers that a step or the caller touches in memory, in order."""
    touched: dict[int, None] = dict.fromkeys(graph.outputs)
    for step in steps:
        if isinstance(step, Extern):
            touched.update((graph.values[v], None) for v in step.reads)
            continue
        for kernel in step.kernels if isinstance(step, Run) else (step,):
            for v in kernel.every:
                for column in v.columns:
                    touched.update(dict.fromkeys(column))
    return tuple(b for b in touched if graph.buffers[b].kind == "temp")
