"""Assign each node its stage: the earliest in which it can run, or a later one.

A legal edge lets both nodes share a kernel. An illegal edge, or one through an extern,
makes the consumer wait for the next kernel. A reduction ends a stage for nodes that
need its result element by element. Nodes on the results themselves (a root, a quotient,
a running mean of rows) are *late*: they run in the same kernel, after the elements.

A node that scales one tensor only for nodes of a later stage runs with those. Computing
it there reads as much as its result would, and the result is never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from ..ir.blocks import SIZED, read_by_block, write_by_block
from ..ir.geometry import memory_order
from ..ir.graph import Extern, Refusal, SchedulerNode, kept
from ..ir.sets import UnionFind
from .alignment import Aligned
from .dependencies import CPU, Edge, Stages, device, space
from .grouping import SharedNumbers
from .legality import Pair, why_not

#: The dimensions that a lane's reductions remove, the shape of their operand, and their
#: order over its memory.
Geometry = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class _Stager:
    """Visits the nodes in program order and assigns each a stage, for all its rows."""

    def __init__(self, aligned: Aligned, numbers: SharedNumbers) -> None:
        self.aligned = aligned
        self.graph = graph = aligned.graph
        self.nodes = nodes = aligned.first
        self.numbers = numbers
        self.stage = [-1 if isinstance(n, Extern) else 0 for n in nodes]
        self.late: set[int] = set()
        self.fused: list[Edge] = []
        self.refusals: dict[tuple[str, str, str], Refusal] = {}
        self.lanes = UnionFind(len(nodes))
        self.geometry: dict[int, Geometry] = {}  # by the root of a lane
        self.reduces = [
            isinstance(n, SchedulerNode) and bool(n.body.reduction) for n in nodes
        ]
        self.any_reduction = any(self.reduces)
        #: lanes that count their elements, by their roots
        self.counting = {
            i
            for i, n in enumerate(nodes)
            if isinstance(n, SchedulerNode)
            and any(x.op in ("index", *SIZED) for x in n.body.instrs)
        }
        self.spaces = [() if isinstance(n, Extern) else space(graph, n) for n in nodes]
        self.devices = [
            "" if isinstance(n, Extern) else device(graph, n) for n in nodes
        ]

    # ------------------------------------------------------------ one node

    def place(self, i: int, incoming: list[Edge]) -> None:
        """Assign node i its stage, from the edges into it."""
        node = self.nodes[i]
        if isinstance(node, Extern):
            for e in incoming:
                self.stage[i] = max(self.stage[i], self.stage[e.producer])
            return
        legal: list[Edge] = []
        for e in incoming:
            if self._legal(e):
                legal.append(e)
                self.stage[i] = max(self.stage[i], self.stage[e.producer])
            else:
                wait = not self._feeds(e)
                self.stage[i] = max(self.stage[i], self.stage[e.producer] + wait)
        if not self.any_reduction:
            self.fused.extend(legal)
            return
        while True:
            beside = [e for e in legal if self.stage[e.producer] == self.stage[i]]
            why = self._conflict(i, beside)
            if why is None:
                break
            self._refuse(beside[0], "reduction", why)
            self.late.discard(i)
            self.stage[i] += 1
        self._join(i, beside)
        self.fused.extend(legal)

    def sink(self, all_edges: list[Edge]) -> None:
        """Move nodes that read elements of one tensor to their consumers' stage."""
        if max(self.stage, default=0) <= 0:
            return
        legal = {e[:2] for e in self.fused}
        #: node -> the edges to its consumers
        behind: dict[int, list[Edge]] = {}
        for e in all_edges:
            behind.setdefault(e.producer, []).append(e)
        for i in reversed(range(len(self.nodes))):
            edges = behind.get(i)
            if edges and self._may_sink(i, edges):
                # an edge that is not legal keeps its ends in different stages
                self.stage[i] = max(
                    self.stage[i],
                    min(
                        self.stage[e.consumer] - ((i, e.consumer) not in legal)
                        for e in edges
                    ),
                )

    def _may_sink(self, i: int, behind: list[Edge]) -> bool:
        """Does a node read elements of one tensor, for pointwise nodes over the same
        elements?
        """
        node = self.nodes[i]
        if isinstance(node, Extern) or self.reduces[i] or i in self.late:
            return False
        graph, space = self.graph, self.spaces[i]
        read = {graph.values[v] for v in node.reads}
        shapes = [graph.buffers[b].shape for b in read]
        if space == () or [s for s in shapes if s != ()] != [space]:
            return False
        return all(
            e.exact
            and not isinstance(self.nodes[e.consumer], Extern)
            and e.consumer not in self.late
            and not self.reduces[e.consumer]
            and self.spaces[e.consumer] == space
            for e in behind
        )

    def _legal(self, e: Edge) -> bool:
        producer = self.nodes[e.producer]
        if isinstance(producer, Extern):
            self._refuse(e, "extern", producer.reason)
            return False
        shared = self.numbers.shared
        crosses = (e.producer in shared) != (e.consumer in shared)
        if crosses and self.reduces[e.producer]:
            # the only lane that makes these numbers may finish them
            crosses = e.consumer not in self.numbers.fed
        buffer = self.graph.buffers[e.buffer]
        result = self.reduces[e.producer] and e.kind != "war"
        pair = Pair(
            buffer,
            buffer.shape if result else self.spaces[e.producer],
            self.spaces[e.consumer],
            self.devices[e.producer],
            self.devices[e.consumer],
            e.kind,
            e.exact,
            crosses,
            self._by_block(e),
        )
        why = why_not(pair)
        if why is None:
            return True
        self._refuse(e, *why)
        return False

    def _by_block(self, e: Edge) -> bool:
        """Does an edge's consumer write numbers of blocks that its producer reads?"""
        a, b = self.nodes[e.producer], self.nodes[e.consumer]
        if e.kind != "war" or isinstance(a, Extern) or isinstance(b, Extern):
            return False
        values = self.graph.values
        read = {values[a.reads[k]] for k in read_by_block(a.body.instrs)}
        written = (v for k, v in enumerate(b.writes) if write_by_block(b.body, k))
        return e.buffer in read & set(map(values.__getitem__, written))

    def _refuse(self, e: Edge, code: str, detail: str) -> None:
        """Record why an edge's nodes do not share a kernel; once for each reason."""
        a, b = self.nodes[e.producer], self.nodes[e.consumer]
        assert isinstance(b, SchedulerNode)
        key = (a.name if isinstance(a, Extern) else a.body.name, b.body.name, code)
        index = self.aligned.list_index
        at = index[e.producer] if index[e.consumer] < 0 else index[e.consumer]
        self.refusals.setdefault(key, Refusal(*key, detail, at, b.line))

    def _feeds(self, e: Edge) -> bool:
        """Does a CPU node feed another device?

        In a stage the CPU comes first, so that its counters do not split the passes of
        a device.
        """
        device, other = self.devices[e.producer], self.devices[e.consumer]
        return device == CPU != other

    # ------------------------------------------------------------ reductions

    def _after(self, e: Edge) -> bool:
        """Is the producer's result available only when the elements are done?"""
        waits = self.reduces[e.producer] and e.kind != "war"
        return waits or e.producer in self.late

    def _conflict(self, i: int, beside: list[Edge]) -> str | None:
        """Return why node i cannot run in the lane of its producers; None if it can."""
        spaces: set[Geometry] = {
            self.geometry[root]
            for root in {self.lanes.find(e.producer) for e in beside}
            if root in self.geometry
        }
        space = self._geometry(i) if self.reduces[i] else None
        if len(spaces | ({space} if space else set())) > 1:
            return "two reductions differ in dimensions, shapes or memory order"
        if (spaces or space) and (i in self.counting or self._counting(beside)):
            return "a kernel cannot count elements that it reduces"
        after = [e for e in beside if self._after(e)]
        if not after:
            return None
        if space:
            return "it reduces the result of a reduction"
        (geometry,) = spaces
        if not self._fits(i, geometry):
            return "its elements are not those of the results"
        for e in beside:
            element = e.kind == "raw" and not self._after(e)
            if element and self.graph.buffers[e.buffer].shape != ():
                return "it needs elements and a result together"
        self.late.add(i)
        return None

    def _counting(self, beside: list[Edge]) -> bool:
        """Does the lane of a producer count its elements?"""
        return any(self.lanes.find(e.producer) in self.counting for e in beside)

    def _geometry(self, i: int) -> Geometry:
        node = self.nodes[i]
        assert isinstance(node, SchedulerNode)
        operand = self.graph.buffers[self.graph.values[node.reads[0]]]
        order = memory_order(operand.shape, operand.stride)
        return node.dims, self.spaces[i], order

    def _fits(self, i: int, geometry: Geometry) -> bool:
        """Does a pointwise node run over the results of its lane's reductions?"""
        dims, whole, _ = geometry
        count = 1
        for n in kept(whole, dims):
            count *= n
        node = self.nodes[i]
        for v in (*node.reads, *node.writes):
            numel = self.graph.buffers[self.graph.values[v]].numel
            if numel != count and not (numel == 1 and v in node.reads):
                return False
        return True

    def _join(self, i: int, beside: list[Edge]) -> None:
        geometry = self._geometry(i) if self.reduces[i] else None
        for e in beside:
            geometry = geometry or self.geometry.get(self.lanes.find(e.producer))
        counting = i in self.counting or self._counting(beside)
        for e in beside:
            self.lanes.join(e.producer, i)
        if counting:
            self.counting.add(self.lanes.find(i))
        if geometry is not None:
            self.geometry[self.lanes.find(i)] = geometry


def _by_consumer(all_edges: list[Edge]) -> Iterator[tuple[int, list[Edge]]]:
    for i, group in groupby(all_edges, lambda e: e.consumer):
        yield i, list(group)


def stages(aligned: Aligned, all_edges: list[Edge], numbers: SharedNumbers) -> Stages:
    """Assign each node its stage. `all_edges` come by consumer, in program order."""
    stager = _Stager(aligned, numbers)
    incoming = dict(_by_consumer(all_edges))
    for i in range(len(aligned.first)):
        edges = incoming.get(i)
        if edges is not None:
            stager.place(i, edges)
        elif stager.reduces[i]:
            stager.place(i, [])
    stager.sink(all_edges)
    stage = stager.stage
    together = tuple(e for e in stager.fused if stage[e.producer] == stage[e.consumer])
    return Stages(
        tuple(stage),
        together,
        tuple(stager.refusals.values()),
        frozenset(stager.late),
    )
