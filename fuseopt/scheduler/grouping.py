"""Lanes: which nodes belong to one parameter, and which parameters do the same.

Nodes joined by legal edges form a *lane*. A number without dimensions (a step counter)
joins the one lane that uses it. One that depends only on what the step leaves alone (a
tensor lr) is computed again in each lane (`clones`); one that several lanes use and the
step changes runs before them (`shared`). Lanes whose nodes are alike, up to scalars and
shapes, form one list: from there on the body exists once. A for-loop over parameters
and a foreach call give the same lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..ir.alias import overlaps
from ..ir.graph import Extern, Graph, ScalarRef, SchedulerNode
from .dependencies import Edge

#: Tensors whose reductions may be finished together in one lane. Were there no limit, a
#: loop that adds up the norms of all parameters would make one lane of them all.
FEEDERS = 4


class UnionFind:
    """Sets of positions that grow together; the least position names its set."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, x: int) -> int:
        parent = self.parent
        while parent[x] != x:
            parent[x] = parent[parent[x]]
            x = parent[x]
        return x

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        if a != b:
            self.parent[max(a, b)] = min(a, b)


@dataclass(frozen=True)
class SharedNumbers:
    """Numbers without dimensions that do not belong to one lane.

    `clones` depend on nothing that the step changes (a tensor lr, `1 - beta`): every
    user computes them again. `shared` change memory and have several lanes as users, so
    that they run once, in a stage before them. `fed`: those of them that come from the
    reductions of a few tensors, whose lane finishes them.
    """

    clones: frozenset[int]
    shared: frozenset[int]
    fed: frozenset[int] = frozenset()


def _is_number(graph: Graph, node: SchedulerNode | Extern) -> bool:
    if isinstance(node, Extern) or node.body.reduction:
        return False
    return all(graph.buffers[graph.values[v]].shape == () for v in node.writes)


def _clones(graph: Graph, number: list[bool]) -> frozenset[int]:
    """Nodes that give one number from numbers that the step never changes."""
    nodes, values = graph.nodes, graph.values
    written: dict[int, int] = {}
    for n in nodes:
        for v in n.writes:
            written[values[v]] = written.get(values[v], 0) + 1
    in_memory = {v for n in nodes if isinstance(n, Extern) for v in n.reads}
    storages: dict[int, int] = {}
    for x in graph.buffers:
        storages[x.storage] = storages.get(x.storage, 0) + 1
    near = overlaps(graph.buffers) if any(number) else {}

    def changed(b: int) -> bool:
        return b in written or any(other in written for other in near.get(b, ()))

    fixed: set[int] = set()  # values that are the same wherever they are computed
    clones: set[int] = set()
    for i, node in enumerate(nodes):
        if not number[i]:
            continue
        (v,) = node.writes
        b = values[v]
        buffer = graph.buffers[b]
        if buffer.kind != "temp" or graph.final[b] >= 0 or written[b] > 1:
            continue
        if v in in_memory or storages[buffer.storage] > 1:
            continue
        if all(
            r in fixed
            or (not changed(values[r]) and graph.buffers[values[r]].shape == ())
            for r in node.reads
        ):
            fixed.add(v)
            clones.add(i)
    return frozenset(clones)


def shared_numbers(graph: Graph, all_edges: list[Edge]) -> SharedNumbers:
    """Find the 0-d computations that no single lane owns."""
    nodes = graph.nodes
    number = [_is_number(graph, n) for n in nodes]
    clones = _clones(graph, number)
    elements = UnionFind(len(nodes))
    numbers = UnionFind(len(nodes))
    bridges: list[tuple[int, int]] = []
    results: list[tuple[int, int]] = []  # of a reduction, into a number
    for e in all_edges:
        a, b = e.producer, e.consumer
        if a in clones or b in clones or not e.exact:
            continue
        if isinstance(nodes[a], Extern) or isinstance(nodes[b], Extern):
            continue
        if number[a] and number[b]:
            numbers.join(a, b)
        elif number[a] or number[b]:
            bridges.append((a, b) if number[a] else (b, a))
            if e.kind == "raw" and nodes[a].body.reduction:  # type: ignore[union-attr]
                results.append((b, a))
        else:
            elements.join(a, b)
    users: dict[int, set[int]] = {}
    for a, b in bridges:
        users.setdefault(numbers.find(a), set()).add(elements.find(b))
    many = {root for root, lanes in users.items() if len(lanes) > 1}
    shared = {
        i
        for i in range(len(nodes))
        if many and number[i] and i not in clones and numbers.find(i) in many
    }
    feeders: dict[int, set[int]] = {}
    for number_, reduction in results:
        root = numbers.find(number_)
        feeders.setdefault(root, set()).add(elements.find(reduction))
    fed = {i for i in shared if 0 < len(feeders.get(numbers.find(i), ())) <= FEEDERS}
    return SharedNumbers(clones, frozenset(shared), frozenset(fed))


class LaneTable(NamedTuple):
    """One lane: its nodes in order, its buffers by slot, its scalars by column.

    `form` is equal for lanes that do the same. It encodes for every node its body, and
    for every operand whether it is an earlier result of the lane or a slot. A slot is a
    buffer and whether it is seen per result of a reduction. `operand` and `reduced`:
    what the lane's first reduction reads and takes away.
    """

    form: tuple[object, ...]
    nodes: tuple[int, ...]
    slots: tuple[tuple[int, bool], ...]
    scalars: tuple[ScalarRef, ...]
    stores: tuple[tuple[int, int], ...]  # (value, slot)
    space: tuple[int, ...]
    operand: int = -1
    reduced: tuple[int, ...] = ()
    reduction: str = ""


def lanes_of_stage(
    graph: Graph, members: Iterable[int], joined: Iterable[Edge], clones: frozenset[int]
) -> list[list[int]]:
    """The nodes of each lane, in program order, lanes by their first node."""
    order = [i for i in members if i not in clones]
    index = {node: k for k, node in enumerate(order)}
    groups = UnionFind(len(order))
    for e in joined:
        if e.producer in index and e.consumer in index:
            groups.join(index[e.producer], index[e.consumer])
    lanes: dict[int, list[int]] = {}
    for k, node in enumerate(order):
        lanes.setdefault(groups.find(k), []).append(node)
    return list(lanes.values())


def describe_lane(
    graph: Graph,
    lane: list[int],
    producer: dict[int, int],
    kept: frozenset[int],
    clones: frozenset[int],
    late: frozenset[int] = frozenset(),
) -> LaneTable:
    """Number a lane's operands so that equal lanes give equal forms.

    `kept`: the values that memory must hold after the kernel. `late`: nodes that run on
    results of reductions.
    """
    values, nodes = graph.values, graph.nodes
    ordered: list[int] = []
    seen: set[int] = set()

    def visit(i: int) -> None:
        if i in seen:
            return
        seen.add(i)
        if clones:
            for v in nodes[i].reads:
                p = producer.get(v)
                if p in clones and p is not None:
                    visit(p)
        ordered.append(i)

    for i in lane:
        visit(i)
    ordered.sort()  # a clone stands where the program had it
    own: dict[int, int] = {}
    slot_of: dict[tuple[int, bool], int] = {}
    scalars: list[ScalarRef] = []
    form: list[object] = []
    last: dict[int, tuple[int, bool]] = {}
    shape: tuple[int, ...] = ()
    operand, reduction = -1, ""
    reduced: tuple[int, ...] = ()
    for i in ordered:
        node = nodes[i]
        assert isinstance(node, SchedulerNode)
        per_result = i in late
        form.append(-id(node.body) if per_result else id(node.body))
        own_space = graph.buffers[values[node.writes[0]]].shape
        for v in node.reads:
            if v in own:
                form.append(own[v])
                continue
            b = values[v]
            number = graph.buffers[b].shape == () and own_space != ()
            place = (b, per_result and not number)
            slot = slot_of.get(place)
            if slot is None:
                slot = slot_of[place] = len(slot_of)
            form.append(-1 - slot)
        scalars.extend(node.scalars)
        if node.body.reduction and operand < 0:
            operand, reduced = values[node.reads[0]], node.dims
            reduction = node.body.reduction
        for v in node.writes:
            own[v] = len(own)
            last[values[v]] = v, per_result or bool(node.body.reduction)
            if operand < 0:
                shape = graph.buffers[values[v]].shape or shape
    if operand >= 0:
        shape = graph.buffers[operand].shape
    stores: list[tuple[int, int]] = []
    for b, (v, per_result) in last.items():
        if v in kept:
            slot = slot_of.get((b, per_result))
            if slot is None:
                slot = slot_of[b, per_result] = len(slot_of)
            stores.append((v, slot))
            form.append((own[v], slot))
    return LaneTable(
        tuple(form),
        tuple(ordered),
        tuple(slot_of),
        tuple(scalars),
        tuple(stores),
        shape,
        operand,
        reduced,
        reduction,
    )
