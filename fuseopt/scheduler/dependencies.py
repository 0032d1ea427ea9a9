"""Dependencies between nodes, by their first rows.

Edges are read-after-write, write-after-read and write-after-write on one buffer, or on
buffers that overlap. An edge between nodes with equally many rows represents one from
each row to the same row. Any other edge represents one from each row or to each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..ir.blocks import write_by_block
from ..ir.graph import Extern, Graph, Refusal, SchedulerNode
from .alignment import Aligned

#: A CPU kernel is done when the next launch starts, on any device.
CPU = "cpu"


class Edge(NamedTuple):
    """Dependency: `consumer` must not run before `producer`, both indices of
    Graph.nodes.

    `buffer` is that of the first row.
    """

    producer: int
    consumer: int
    buffer: int
    kind: str
    exact: bool = True


@dataclass(frozen=True)
class Stages:
    """Stage of each node: `stage[i]`. Kernel s runs before the externs of stage s.

    `fused` are the edges whose two ends may share a kernel. `late`: pointwise nodes
    that run on the results of their lane's reductions.
    """

    stage: tuple[int, ...]
    fused: tuple[Edge, ...]
    refusals: tuple[Refusal, ...]
    late: frozenset[int] = frozenset()


def edges(aligned: Aligned) -> Iterator[Edge]:
    """Yield all dependencies, by consumer in program order."""
    graph, near = aligned.graph, aligned.near
    producer: dict[int, int] = {}
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    values = graph.values
    last_ordered = -1
    for i, node in enumerate(aligned.first):
        if isinstance(node, Extern) and node.ordered:
            if last_ordered >= 0:
                yield Edge(last_ordered, i, -1, "order")
            last_ordered = i
        for v in node.reads:
            b = values[v]
            maker = producer.get(v)
            if maker is not None:
                yield Edge(maker, i, b, "raw")
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
    """The index space of a row: the shape of its result, or of what it reduces."""
    reduces = node.body.reduction or write_by_block(node.body, 0)
    v = node.reads[0] if reduces else node.writes[0]
    return graph.buffers[graph.values[v]].shape


def device(graph: Graph, node: SchedulerNode) -> str:
    """Return the device of a row's result."""
    return graph.buffers[graph.values[node.writes[0]]].device
