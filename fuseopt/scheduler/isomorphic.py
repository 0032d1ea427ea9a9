"""Graph -> the part of it that has to be planned; the rest is planned like it.

Nodes that share no memory that the step changes do not know of each other: each such
*island*, mostly one parameter with its state, can be planned by itself. Islands that do
the same to memory of the same kind have the same plan, so only the first of them is
looked at, and its lanes are written down again for the others. Shapes are told apart
only where something is reduced; the rules of pointwise nodes ask no more of two shapes
than whether they are equal.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..ir.graph import Extern, Graph, ScalarRef, SchedulerNode
from .grouping import LaneTable, UnionFind

Shape = tuple[int, ...]


class Island(NamedTuple):
    """Nodes, in program order, with the values, buffers and shapes that they touch,
    each in order of first use.
    """

    nodes: tuple[int, ...]
    values: tuple[int, ...]
    buffers: tuple[int, ...]
    shapes: tuple[Shape, ...]


@dataclass(frozen=True)
class Planned:
    """`graph` has the nodes that must be planned; `place` says where they stand in the
    whole. `like` has, by node of the whole that leads an island, that island and those
    that are like it; `leader` the leading node of each node.
    """

    graph: Graph
    whole: Graph
    place: tuple[int, ...]
    like: dict[int, tuple[Island, ...]]
    leader: dict[int, int]

    def everywhere(self, nodes: Sequence[int]) -> Iterator[int]:
        """Nodes of `graph`, as they stand in the whole, and those like them."""
        for i in nodes:
            at = self.place[i]
            islands = self.like.get(self.leader.get(at, -1))
            if islands is None:
                yield at
            else:
                k = islands[0].nodes.index(at)
                yield from (island.nodes[k] for island in islands)

    def spread(
        self, lane: Sequence[int], table: LaneTable
    ) -> Iterator[tuple[int, LaneTable]]:
        """A lane of `graph` and those like it: the first node and the table of each, in
        the numbers of the whole.
        """
        first = self.place[lane[0]]
        nodes = tuple([self.place[i] for i in table.nodes])
        islands = self.like.get(self.leader.get(first, -1))
        yield first, table._replace(nodes=nodes)
        if islands is None or len(islands) == 1:
            return
        own = islands[0]
        node = {i: k for k, i in enumerate(own.nodes)}
        value = {v: k for k, v in enumerate(own.values)}
        buffer = {b: k for k, b in enumerate(own.buffers)}
        head = node[first]
        at = [node[i] for i in nodes]
        slots = [(buffer[b], late) for b, late in table.slots]
        stores = [(value[v], slot) for v, slot in table.stores]
        space = own.shapes.index(table.space) if table.space else -1
        operand = buffer[table.operand] if table.operand >= 0 else -1
        numbered = bool(table.scalars)
        for other in islands[1:]:
            picked = tuple([other.nodes[k] for k in at])
            yield (
                other.nodes[head],
                table._replace(
                    nodes=picked,
                    slots=tuple([(other.buffers[k], late) for k, late in slots]),
                    scalars=self._scalars(picked) if numbered else (),
                    stores=tuple([(other.values[k], slot) for k, slot in stores]),
                    space=() if space < 0 else other.shapes[space],
                    operand=-1 if operand < 0 else other.buffers[operand],
                ),
            )

    def _scalars(self, nodes: Sequence[int]) -> tuple[ScalarRef, ...]:
        found: list[ScalarRef] = []
        for i in nodes:
            node = self.whole.nodes[i]
            assert isinstance(node, SchedulerNode)
            found += node.scalars
        return tuple(found)


def alike(graph: Graph) -> Planned:
    """Find the islands of a graph, and which of them are like an earlier one."""
    classes: dict[tuple[Any, ...], list[Island]] = {}
    leader: dict[int, int] = {}
    left: list[int] = []
    shared = _shared_storages(graph)
    for nodes in _islands(graph):
        described = _describe(graph, nodes, shared)
        if described is None:
            left += nodes
            continue
        key, island = described
        known = classes.setdefault(key, [])
        if known and not all(map(operator.lt, known[-1].nodes, nodes)):
            left += nodes  # what comes first there would not come first here
            continue
        if not known:
            left += nodes
            leader.update(dict.fromkeys(nodes, nodes[0]))
        known.append(island)
    left.sort()
    like = {known[0].nodes[0]: tuple(known) for known in classes.values() if known}
    if len(left) == len(graph.nodes):
        return Planned(graph, graph, tuple(left), like, leader)
    small = replace(graph, nodes=tuple([graph.nodes[i] for i in left]))
    return Planned(small, graph, tuple(left), like, leader)


def _islands(graph: Graph) -> list[list[int]]:
    """The nodes of each island, by their first node."""
    values = graph.values
    numbers: dict[int, int] = {}
    storage = [numbers.setdefault(b.storage, len(numbers)) for b in graph.buffers]
    written = {storage[values[v]] for n in graph.nodes for v in n.writes}
    sets = UnionFind(len(numbers) + 1)
    ordered = len(numbers)  # calls that keep their order touch this, so to speak
    at: list[int] = []
    for n in graph.nodes:
        touched = [storage[values[v]] for v in n.writes]
        touched += [s for v in n.reads if (s := storage[values[v]]) in written]
        if isinstance(n, Extern) and (n.ordered or not touched):
            touched.append(ordered)
        first = touched[0]
        for other in touched:
            if other != first:
                sets.join(first, other)
        at.append(first)
    islands: dict[int, list[int]] = {}
    for i, first in enumerate(at):
        islands.setdefault(sets.find(first), []).append(i)
    return list(islands.values())


def _shared_storages(graph: Graph) -> frozenset[int]:
    """Storages that several buffers lie in."""
    counts = Counter(b.storage for b in graph.buffers)
    return frozenset(storage for storage, n in counts.items() if n > 1)


def _describe(
    graph: Graph, nodes: Sequence[int], shared: frozenset[int]
) -> tuple[tuple[Any, ...], Island] | None:
    """What an island does, equal for those that do the same, and the island; None for
    one that keeps a call, or sees memory in several ways.
    """
    values: dict[int, int] = {}
    buffers: dict[int, int] = {}
    shapes: dict[Shape, int] = {}
    key: list[Any] = []
    steps: list[SchedulerNode] = []
    exact = False
    for i in nodes:
        n = graph.nodes[i]
        if isinstance(n, Extern):
            return None
        exact |= n.body.reduction != ""
        steps.append(n)
    for n in steps:
        key.append(id(n.body))
        key.append(n.dims)
        for v in (*n.reads, *n.writes):
            k = values.get(v)
            if k is None:
                k = values[v] = len(values)
                b = graph.values[v]
                if b not in buffers:
                    buffers[b] = len(buffers)
                    own = graph.buffers[b]
                    if own.storage in shared:
                        return None
                    shape = shapes.setdefault(own.shape, len(shapes))
                    key.append(own.shape if exact or not own.shape else shape)
                    key.append((own.dtype, own.device, own.kind == "temp"))
                key.append((buffers[b], v == graph.initial[b]))
            key.append(k)
    for b in buffers:
        last = graph.final[b]
        key.append(-2 if last < 0 else values.get(last, -1))
    island = Island(tuple(nodes), tuple(values), tuple(buffers), tuple(shapes))
    return tuple(key), island
