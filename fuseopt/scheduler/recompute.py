"""Select nodes that later kernels compute again, so that their results need no memory.

A kernel often reads elements that an earlier one computed from little. Examples are a
gradient cast to another type, and an update from a row, a column and the gradient. To
store and read such a temp moves more bytes than to compute it again. It also needs
memory.

A later kernel may compute a value again if each tensor that it is computed from still
holds the same version there. It does so where that moves fewer bytes, and takes no more
quotients and roots than it saves loads and stores of elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..ir.blocks import write_by_block
from ..ir.graph import DTYPE_BYTES, Extern, SchedulerNode
from .alignment import Aligned
from .dependencies import Stages, device, space

#: Instructions that cost no more than a load, and those that take several times as
#: long. What is neither is not computed twice.
LIGHT = frozenset(
    "load scalar const cast add sub mul fma neg abs max min lt le eq ne where "
    "bitcast isnan and or xor not".split()
)
HEAVY = frozenset({"div", "sqrt", "vsqrt"})


class _Again(NamedTuple):
    """The nodes that compute a value again, and the values in memory that they read."""

    nodes: frozenset[int]
    sources: frozenset[int]


@dataclass
class _Recompute:
    """Decides node by node, in program order."""

    aligned: Aligned
    plan: Stages
    lane_of: dict[int, int]
    kept: frozenset[int]
    clones: frozenset[int]

    def __post_init__(self) -> None:
        first, values = self.aligned.first, self.aligned.graph.values
        self.producer = {v: i for i, n in enumerate(first) for v in n.writes}
        self.readers: dict[int, list[int]] = {}
        self.writers: dict[int, list[int]] = {}
        for i, n in enumerate(first):
            for v in dict.fromkeys(n.reads):
                self.readers.setdefault(v, []).append(i)
            for v in n.writes:
                self.writers.setdefault(values[v], []).append(i)
        self.lanes: dict[int, list[int]] = {}
        for i, lane in self.lane_of.items():
            self.lanes.setdefault(lane, []).append(i)
        self.chosen: set[int] = set()

    def run(self) -> frozenset[int]:
        """Return the nodes that other lanes than theirs compute again."""
        for i, node in enumerate(self.aligned.first):
            if isinstance(node, SchedulerNode) and i not in self.clones:
                again = self._worthwhile(i, node)
                if again is not None:
                    self.chosen |= again
        return frozenset(self.chosen)

    def _worthwhile(self, i: int, node: SchedulerNode) -> frozenset[int] | None:
        """Return the nodes to compute again instead of a load of node i's result."""
        if len(node.writes) != 1 or not self._is_temp(node.writes[0]):
            return None
        elsewhere = self._readers_elsewhere(i, node)
        if not elsewhere or not all(self._may_compute(n, i) for n in elsewhere):
            return None
        lanes = list(dict.fromkeys(self.lane_of[n] for n in elsewhere))
        again = self._closure(i)
        if again is None:
            return None
        width = self._bytes(node.writes[0], i)
        saved, heavy = width * (1 + len(lanes)), 0
        for lane in lanes:
            if not all(self._still_there(v, lane) for v in again.sources):
                return None
            read = {v for n in self.lanes[lane] for v in self.aligned.first[n].reads}
            saved -= sum(self._bytes(v, i) for v in again.sources - read)
            heavy += sum(self._heavy(n) for n in again.nodes)
        # each lane saves a load, and all save one store: a root or a quotient takes
        # about as long as one of them
        if saved <= 0 or heavy > HEAVY_PER_ACCESS * (1 + len(lanes)):
            return None
        return again.nodes

    # ------------------------------------------------------------ conditions

    def _is_temp(self, v: int) -> bool:
        """Is a value only needed by nodes, in memory that no other buffer shares?"""
        graph, b = self.aligned.graph, self.aligned.graph.values[v]
        return (
            v in self.kept
            and graph.buffers[b].kind == "temp"
            and graph.final[b] < 0
            and b not in graph.outputs
            and not self.aligned.near.get(b)
        )

    def _readers_elsewhere(self, i: int, node: SchedulerNode) -> list[int]:
        """Return the nodes that read node i's result outside of its lane."""
        readers, own = self.readers.get(node.writes[0], ()), self.lane_of[i]
        return [n for n in readers if self.lane_of.get(n) != own]

    def _may_compute(self, reader: int, i: int) -> bool:
        """Does a reader use the elements of node i's result as its own elements?"""
        graph, plan = self.aligned.graph, self.plan
        node, user = self.aligned.first[i], self.aligned.first[reader]
        if isinstance(node, Extern) or isinstance(user, Extern):
            return False
        if {i, reader} & plan.late or node.body.reduction:
            return False
        own = space(graph, node)
        return (
            own != ()
            and space(graph, user) == own
            and self.aligned.rows(reader) == self.aligned.rows(i)
            and device(graph, user) == device(graph, node)
        )

    def _closure(self, i: int) -> _Again | None:
        """Return what node i is computed from, back to values in memory."""
        graph, first = self.aligned.graph, self.aligned.first
        own = first[i]
        assert isinstance(own, SchedulerNode)
        nodes, sources, todo = {i}, set[int](), [i]
        while todo:
            n = todo.pop()
            node = first[n]
            if not isinstance(node, SchedulerNode) or not self._simple(n, node):
                return None
            if space(graph, node) != space(graph, own):
                return None
            if self.aligned.rows(n) != self.aligned.rows(i):
                return None
            for v in node.reads:
                maker = self.producer.get(v)
                if maker is None or (v in self.kept and maker not in self.chosen):
                    sources.add(v)
                elif maker not in self.clones and maker not in nodes:
                    nodes.add(maker)
                    todo.append(maker)
        return _Again(frozenset(nodes), frozenset(sources))

    def _simple(self, n: int, node: SchedulerNode) -> bool:
        """Is a node pointwise arithmetic that depends on nothing but its operands?"""
        ops = {x.op for x in node.body.instrs}
        return (
            not node.body.reduction
            and n not in self.plan.late
            and not write_by_block(node.body, 0)
            and ops <= LIGHT | HEAVY
        )

    def _still_there(self, v: int, lane: int) -> bool:
        """Does memory hold a value while a lane runs?"""
        values, stage = self.aligned.graph.values, self.plan.stage
        at = stage[self.lanes[lane][0]]
        maker, b = self.producer.get(v), values[v]
        if maker is None and v != self.aligned.graph.initial[b]:
            return False
        if maker is not None and stage[maker] >= at:
            return False
        for near in (b, *self.aligned.near.get(b, ())):
            for w in self.writers.get(near, ()):
                before = maker is not None and near == b and w <= maker
                if not before and stage[w] <= at:
                    return False
        return True

    # ------------------------------------------------------------ costs

    def _bytes(self, v: int, i: int) -> float:
        """Return the bytes of a value for each element of node i's result."""
        graph = self.aligned.graph
        node = self.aligned.first[i]
        whole = graph.buffers[graph.values[node.writes[0]]].numel
        buffer = graph.buffers[graph.values[v]]
        return DTYPE_BYTES[buffer.dtype] * buffer.numel / max(whole, 1)

    def _heavy(self, n: int) -> int:
        node = self.aligned.first[n]
        assert isinstance(node, SchedulerNode)
        return sum(x.op in HEAVY for x in node.body.instrs)


#: Quotients and roots that may be computed again for each load or store that is saved.
HEAVY_PER_ACCESS = 2


def recomputed(
    aligned: Aligned,
    plan: Stages,
    lane_of: dict[int, int],
    kept: frozenset[int],
    clones: frozenset[int],
) -> frozenset[int]:
    """Return the nodes that lanes of later kernels compute again.

    `kept`: the values that memory must hold otherwise. `clones`: numbers that each lane
    computes anyway.
    """
    if max(plan.stage, default=0) <= 0:
        return frozenset()
    return _Recompute(aligned, plan, lane_of, kept, clones).run()
