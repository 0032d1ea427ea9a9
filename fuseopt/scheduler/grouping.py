"""Group nodes into lanes, each of one parameter, and lanes that are alike into tables.

Legal edges join nodes into *lanes*, one for each row. A number without dimensions (a
step counter) joins the only lane that uses it. A number that depends only on unchanged
values (a tensor lr) is computed again in each lane (`clones`). One that several lanes
use and the step changes runs before them (`shared`). Lanes of other nodes with the same
arithmetic, up to scalars and shapes, have equal forms and become rows of one table.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..ir.alias import shared_storages
from ..ir.blocks import write_by_block
from ..ir.graph import (
    Column,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Row,
    ScalarRef,
)
from ..ir.sets import UnionFind
from .alignment import Aligned
from .dependencies import Edge

#: The largest number of tensors whose reductions are finished together in one lane.
#: Without a limit, a loop that sums the norms of all parameters would join them all.
FEEDERS = 4


@dataclass(frozen=True)
class SharedNumbers:
    """Numbers without dimensions that do not belong to one lane.

    `clones` depend on nothing that the step changes (a tensor lr, `1 - beta`): every
    user computes them again. `shared` change memory and have several lanes as users, so
    that they run once, in a stage before them. `fed`: those among them that come from
    the reductions of a few tensors, whose lane finishes them.
    """

    clones: frozenset[int]
    shared: frozenset[int]
    fed: frozenset[int] = frozenset()


def _is_number(graph: Graph, node: Row) -> bool:
    if isinstance(node, Extern) or node.body.reduction:
        return False
    return all(graph.buffers[graph.values[v]].shape == () for v in node.writes)


def _clones(aligned: Aligned, number: list[bool]) -> frozenset[int]:
    """Return nodes that compute one number from numbers that the step never changes."""
    if not any(number):
        return frozenset()
    graph, nodes, near = aligned.graph, aligned.first, aligned.near
    values = graph.values
    written: dict[int, int] = {}
    for n in nodes:
        for v in n.writes:
            written[values[v]] = written.get(values[v], 0) + 1
    in_memory = {v for n in nodes if isinstance(n, Extern) for v in n.reads}
    several = shared_storages(graph.buffers)

    def changed(b: int) -> bool:
        return b in written or any(other in written for other in near.get(b, ()))

    fixed: set[int] = set()  # values that are equal wherever they are computed
    clones: set[int] = set()
    for i, node in enumerate(nodes):
        if not number[i]:
            continue
        (v,) = node.writes
        b = values[v]
        buffer = graph.buffers[b]
        if buffer.kind != "temp" or graph.final[b] >= 0 or written[b] > 1:
            continue
        if v in in_memory or buffer.storage in several:
            continue
        if all(
            r in fixed
            or (not changed(values[r]) and graph.buffers[values[r]].shape == ())
            for r in node.reads
        ):
            fixed.add(v)
            clones.add(i)
    return frozenset(clones)


class _Lanes:
    """Sets of nodes, each with its number of lanes: the rows of all its nodes."""

    def __init__(self, aligned: Aligned) -> None:
        self.sets = UnionFind(len(aligned.first))
        self.lanes = [aligned.rows(i) for i in range(len(aligned.first))]
        self.find = self.sets.find

    def join(self, a: int, b: int) -> None:
        """Merge the sets of two nodes that an edge joins, row by row."""
        lanes = min(self.lanes[self.find(a)], self.lanes[self.find(b)])
        self.sets.join(a, b)
        self.lanes[self.find(a)] = lanes

    def meeting(self, root: int, others: Iterable[int], of: _Lanes) -> int:
        """Return how many lanes of other sets, by their roots, one lane of a set
        touches.
        """
        return sum(max(1, of.lanes[x] // self.lanes[root]) for x in others)


def shared_numbers(aligned: Aligned, all_edges: list[Edge]) -> SharedNumbers:
    """Find the 0-d computations that no single lane owns."""
    nodes = aligned.first
    number = [_is_number(aligned.graph, n) for n in nodes]
    clones = _clones(aligned, number)
    elements, numbers = _Lanes(aligned), _Lanes(aligned)
    bridges: list[tuple[int, int]] = []
    results: list[tuple[int, int]] = []  # edges from a reduction to a number
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
    many = {
        root
        for root, elsewhere in users.items()
        if numbers.meeting(root, elsewhere, elements) > 1
    }
    shared = {
        i
        for i in range(len(nodes))
        if many and number[i] and i not in clones and numbers.find(i) in many
    }
    feeders: dict[int, set[int]] = {}
    for number_, reduction in results:
        root = numbers.find(number_)
        feeders.setdefault(root, set()).add(elements.find(reduction))
    few = {
        root
        for root, elsewhere in feeders.items()
        if numbers.meeting(root, elsewhere, elements) <= FEEDERS
    }
    fed = {i for i in shared if numbers.find(i) in few}
    return SharedNumbers(clones, frozenset(shared), frozenset(fed))


class LaneTable(NamedTuple):
    """Lanes that are alike.

    Nodes are in order, buffers by slot, and scalars by column, with an entry for each
    lane; `home` has its place in the program. `form` is equal for lanes with equal
    arithmetic. It encodes the body of every node. It also encodes for every operand
    whether it is an earlier result of the lane or a slot. A slot is the buffer of the
    first lane, and whether it has an element per result of a reduction. `operands` and
    `reduced`: the input and the dimensions of the lane's first reduction.
    """

    form: tuple[object, ...]
    nodes: tuple[int, ...]
    slots: tuple[tuple[int, bool], ...]
    stores: tuple[tuple[int, int], ...]  # (value of the first lane, slot)
    home: tuple[tuple[int, int], ...]
    columns: tuple[Column, ...]
    scalars: tuple[tuple[ScalarRef, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    operands: Column = ()
    reduced: tuple[tuple[int, ...], ...] = ()
    reduction: str = ""


def lanes_of_stage(
    members: Iterable[int], joined: Iterable[Edge], clones: frozenset[int]
) -> list[list[int]]:
    """Return the nodes that form lanes together, by first node, in program order."""
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


def _with_clones(
    aligned: Aligned, lane: list[int], producer: dict[int, int], clones: frozenset[int]
) -> list[int]:
    """Return a lane's nodes and the clones that they need, in program order."""
    if not clones:
        return lane
    todo, seen = list(lane), set(lane)
    while todo:
        for v in aligned.first[todo.pop()].reads:
            p = producer.get(v, -1)
            if p in clones and p not in seen:
                seen.add(p)
                todo.append(p)
    return sorted(seen)


def describe_lanes(
    aligned: Aligned,
    lane: list[int],
    producer: dict[int, int],
    kept: frozenset[int],
    clones: frozenset[int],
    late: frozenset[int] = frozenset(),
) -> LaneTable:
    """Number the operands of lanes so that equal lanes give equal forms.

    `kept`: the values that memory must hold after the kernel. `late`: nodes that run on
    results of reductions. Only values of first rows are looked up.
    """
    graph = aligned.graph
    values, buffers = graph.values, graph.buffers
    node, rows = aligned.home[lane[0]]
    ordered = _with_clones(aligned, lane, producer, clones)

    def of_lanes(column: Column) -> Column:
        """Return the buffers of a column; a clone has one for all lanes."""
        buffers = aligned.buffers(column)
        return buffers if len(buffers) == len(rows) else buffers * len(rows)

    local: dict[int, int] = {}
    slot_of: dict[tuple[int, bool], int] = {}
    columns: list[Column] = []
    scalars: list[tuple[ScalarRef, ...]] = []
    form: list[object] = []
    last: dict[int, tuple[int, bool, Column]] = {}
    space: Column = ()
    reduction: ForeachSchedulerNode | None = None
    for i in ordered:
        n = graph.nodes[i]
        assert isinstance(n, ForeachSchedulerNode)
        per_result = i in late
        form.append(-id(n.body) if per_result else id(n.body))
        own_space = buffers[values[n.writes[0][0]]].shape
        for column in n.reads:
            v = column[0]
            if v in local:
                form.append(local[v])
                continue
            b = values[v]
            number = buffers[b].shape == () and own_space != ()
            place = (b, per_result and not number)
            slot = slot_of.get(place)
            if slot is None:
                slot = slot_of[place] = len(slot_of)
                columns.append(of_lanes(column))
            form.append(-1 - slot)
        scalars += [c if n.rows == len(rows) else c * len(rows) for c in n.scalars]
        if n.body.reduction and reduction is None:
            reduction, space = n, n.reads[0]
        for k, column in enumerate(n.writes):
            v = column[0]
            local[v] = len(local)
            last[values[v]] = v, per_result or bool(n.body.reduction), column
            by_block = write_by_block(n.body, k)
            if by_block and reduction is None:
                space = space or n.reads[0]
            elif reduction is None and (buffers[values[v]].shape or not space):
                space = column
    stores: list[tuple[int, int]] = []
    for b, (v, per_result, column) in last.items():
        if v in kept:
            slot = slot_of.get((b, per_result))
            if slot is None:
                slot = slot_of[b, per_result] = len(slot_of)
                columns.append(of_lanes(column))
            stores.append((v, slot))
            form.append((local[v], slot))
    whole = of_lanes(space)
    return LaneTable(
        tuple(form),
        tuple(ordered),
        tuple(slot_of),
        tuple(stores),
        tuple([(node, k) for k in rows]),
        tuple(columns),
        tuple(scalars),
        tuple([buffers[b].shape for b in whole]),
        *((whole, reduction.dims, reduction.body.reduction) if reduction else ()),
    )


def merged(tables: list[LaneTable]) -> LaneTable:
    """Merge tables of one form into one, with its lanes in program order."""
    first = tables[0]
    if len(tables) == 1:
        return first
    home = [place for t in tables for place in t.home]
    order = sorted(range(len(home)), key=home.__getitem__)

    def column(entries: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
        every = [x for entry in entries for x in entry]
        return tuple([every[k] for k in order]) if every else ()

    def columns(lists: Iterable[tuple[Any, ...]]) -> tuple[Any, ...]:
        return tuple([column(c) for c in zip(*lists, strict=True)])

    return first._replace(
        home=column(t.home for t in tables),
        columns=columns(t.columns for t in tables),
        scalars=columns(t.scalars for t in tables),
        shapes=column(t.shapes for t in tables),
        operands=column(t.operands for t in tables),
        reduced=column(t.reduced for t in tables),
    )
