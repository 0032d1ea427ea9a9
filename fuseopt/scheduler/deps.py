"""Dependencies between nodes, and the stage in which each can run at the earliest.

Edges are read-after-write, write-after-read and write-after-write on one buffer, or on
buffers that overlap. A legal edge (legality.py) lets both nodes share a kernel; an
illegal one, or one through an extern, makes the consumer wait for the next kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir import Extern, Graph, Refusal, SchedulerNode
from ..overlap import overlaps
from .legality import Pair, why_not


@dataclass(frozen=True)
class Edge:
    """`consumer` must not run before `producer`; both are positions in Graph.nodes."""

    producer: int
    consumer: int
    buffer: int
    kind: str
    exact: bool = True


@dataclass(frozen=True)
class Stages:
    """`stage[i]` of each node; kernel s runs before the externs of stage s.

    `fused` are the edges whose two ends may share a kernel.
    """

    stage: tuple[int, ...]
    fused: tuple[Edge, ...]
    refusals: tuple[Refusal, ...]


def edges(graph: Graph) -> Iterator[Edge]:
    """All dependencies, by consumer in program order."""
    near = overlaps(graph.buffers)
    producer: dict[int, int] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    values = graph.values
    last_ordered = -1
    for i, node in enumerate(graph.nodes):
        if isinstance(node, Extern) and node.ordered:
            if last_ordered >= 0:
                yield Edge(last_ordered, i, -1, "order")
            last_ordered = i
        for v in node.reads:
            b = values[v]
            made = producer.get(v)
            if made is not None:
                yield Edge(made, i, b, "raw")
            elif b in writer and v != graph.initial[b]:
                yield Edge(writer[b], i, b, "raw", exact=False)
            for other in near.get(b, ()):
                if other in writer:
                    yield Edge(writer[other], i, b, "raw", exact=False)
        for v in node.writes:
            b = values[v]
            for r in readers.get(b, ()):
                if r != i:
                    yield Edge(r, i, b, "war")
            if b in writer and not readers.get(b):
                yield Edge(writer[b], i, b, "waw")
            for other in near.get(b, ()):
                for r in readers.get(other, ()):
                    if r != i:
                        yield Edge(r, i, b, "war", exact=False)
                if other in writer and writer[other] != i:
                    yield Edge(writer[other], i, b, "waw", exact=False)
        for v in node.reads:
            readers.setdefault(values[v], []).append(i)
        for v in node.writes:
            b = values[v]
            producer[v] = i
            writer[b] = i
            readers[b] = []


def space(graph: Graph, node: SchedulerNode) -> tuple[int, ...]:
    """The index space of a node: the shape of its result."""
    return graph.buffers[graph.values[node.writes[0]]].shape


def device(graph: Graph, node: SchedulerNode) -> str:
    """Where a node runs: the device of its result."""
    return graph.buffers[graph.values[node.writes[0]]].device


def stages(graph: Graph, all_edges: list[Edge], shared: frozenset[int]) -> Stages:
    """Give each node its stage. `shared`: nodes that make a number for many lanes."""
    nodes = graph.nodes
    stage = [-1 if isinstance(n, Extern) else 0 for n in nodes]
    fused: list[Edge] = []
    refusals: dict[tuple[str, str, str], Refusal] = {}
    spaces = [() if isinstance(n, Extern) else space(graph, n) for n in nodes]
    devices = ["" if isinstance(n, Extern) else device(graph, n) for n in nodes]
    for e in all_edges:
        a, b = nodes[e.producer], nodes[e.consumer]
        if isinstance(b, Extern):
            stage[e.consumer] = max(stage[e.consumer], stage[e.producer])
            continue
        if isinstance(a, Extern):
            stage[e.consumer] = max(stage[e.consumer], stage[e.producer] + 1)
            key = (a.name, b.body.name, "extern")
            refusals.setdefault(key, Refusal(a.name, b.body.name, "extern", a.reason))
            continue
        crosses = (e.producer in shared) != (e.consumer in shared)
        pair = Pair(
            graph.buffers[e.buffer],
            spaces[e.producer],
            spaces[e.consumer],
            devices[e.producer],
            devices[e.consumer],
            e.kind,
            e.exact,
            crosses,
        )
        why = why_not(pair)
        if why is None:
            stage[e.consumer] = max(stage[e.consumer], stage[e.producer])
            fused.append(e)
            continue
        stage[e.consumer] = max(stage[e.consumer], stage[e.producer] + 1)
        code, detail = why
        key = (a.body.name, b.body.name, code)
        refusals.setdefault(key, Refusal(a.body.name, b.body.name, code, detail))
    together = tuple(e for e in fused if stage[e.producer] == stage[e.consumer])
    return Stages(tuple(stage), together, tuple(refusals.values()))
