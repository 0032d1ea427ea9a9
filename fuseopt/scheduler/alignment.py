"""Split the nodes of a graph where rows differ in a property that a rule reads.

A *lane* is a connected set of rows: rows that touch the same memory, if a row writes
it. In the result, all rows of a node belong to lanes that are alike. If row k of one
node touches row k of another, then so does every other row; or all rows read one value.
So the scheduler reads only first rows, and its results hold at every list index.

Many lanes may read a number without dimensions that no list has made, such as a total
norm. It does not join them, unless `tied` lists it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any, cast

from ..ir.alias import overlaps, shared_storages
from ..ir.geometry import memory_order
from ..ir.graph import (
    Column,
    Extern,
    ForeachSchedulerNode,
    Graph,
    Node,
    Row,
    read_by,
    written_by,
)
from ..ir.sets import UnionFind

#: Rows of nodes, by node: entry k of each belongs to lane k.
Frame = dict[int, Sequence[int]]


@dataclass(frozen=True)
class Aligned:
    """A graph with split nodes.

    `first[i]` is the first row of node i. `home[i]` is its node in the original graph,
    with its rows there; `list_index[i]` is the first of these, or -1 without a list.
    `near`: the overlapping buffers, see `overlaps`.
    """

    graph: Graph
    first: tuple[Row, ...]
    home: tuple[tuple[int, Sequence[int]], ...]
    list_index: tuple[int, ...]
    near: dict[int, list[int]]

    def rows(self, i: int) -> int:
        """Return the number of rows of node i."""
        return len(self.home[i][1])

    def buffers(self, column: Column) -> Column:
        """Return the buffers of a column of values."""
        return tuple(map(self.graph.values.__getitem__, column))


def align(graph: Graph, tied: frozenset[int] = frozenset()) -> Aligned:
    """Split the nodes of a graph until rows of one are alike; see the module.

    `tied`: numbers whose readers all form one lane.
    """
    near = overlaps(graph.buffers)
    wide = [i for i, n in enumerate(graph.nodes) if _rows(n) > 1]
    pieces: dict[int, list[Sequence[int]]] = {}
    if wide:
        facts = _Facts(graph, wide, near)
        for frame in _frames(facts, tied):
            for part in facts.alike(frame):
                for i, rows in part.items():
                    pieces.setdefault(i, []).append(rows)
    nodes: list[Node] = []
    home: list[tuple[int, Sequence[int]]] = []
    index: list[int] = []
    for i, n in enumerate(graph.nodes):
        for rows in sorted(pieces.get(i, [range(1)]), key=operator.itemgetter(0)):
            whole = rows == range(_rows(n))
            nodes.append(n if whole or isinstance(n, Extern) else n.pick(rows))
            home.append((i, rows))
            index.append(rows[0] if _rows(n) > 1 else -1)
    first = tuple([n if isinstance(n, Extern) else n.row(0) for n in nodes])
    aligned = replace(graph, nodes=tuple(nodes))
    return Aligned(aligned, first, tuple(home), tuple(index), near)


def _rows(node: Node) -> int:
    return 1 if isinstance(node, Extern) else node.rows


# ---------------------------------------------------------------- lanes


def _frames(facts: _Facts, tied: frozenset[int]) -> Iterator[Frame]:
    """Yield groups of nodes whose rows touch each other row by row."""
    joining = facts.joining(tied)
    nodes = list(facts.columns)
    place = {i: k for k, i in enumerate(nodes)}
    sets = UnionFind(len(nodes))
    owner: dict[int, int] = {}  # buffer -> the first node with its column
    node_of: dict[Column, int] = {}
    crossed: list[int] = []  # nodes whose columns touch in a different order
    for i in nodes:
        for column in dict.fromkeys(facts.columns[i]):
            if joining.isdisjoint(column):
                continue
            if column in node_of:
                sets.join(place[i], place[node_of[column]])
                continue
            node_of[column] = i
            met = set(map(owner.get, column)) - {None}
            if met or len(set(column)) < len(column):
                crossed.append(i)
                for other in met:
                    sets.join(place[i], place[cast(int, other)])
            owner.update(dict.fromkeys(column, i))
    # a view that is only read belongs to the lane that writes its memory
    # buffer -> the first (node, row) that touches it
    place_of: dict[int, tuple[int, int]] = {}
    for i in nodes if facts.near else ():
        for column in facts.columns[i]:
            for k, b in enumerate(column):
                for x in facts.anchors(b, joining):
                    other, row = place_of.setdefault(x, (i, k))
                    sets.join(place[i], place[other])
                    if row != k:
                        crossed += (i, other)
    bundles: dict[int, list[int]] = {}
    for i in nodes:
        bundles.setdefault(sets.find(place[i]), []).append(i)
    rough = {sets.find(place[i]) for i in crossed}
    for root, bundle in bundles.items():
        if root in rough:
            yield from _untangled(facts, bundle, joining)
        else:
            yield {i: range(_rows(facts.graph.nodes[i])) for i in bundle}


def _untangled(
    facts: _Facts, nodes: Sequence[int], joining: frozenset[int]
) -> Iterator[Frame]:
    """Yield groups row by row, for lists of unequal length or in a different order."""
    places = [(i, k) for i in nodes for k in range(_rows(facts.graph.nodes[i]))]
    number = {place: at for at, place in enumerate(places)}
    sets = UnionFind(len(places))
    holder: dict[int, int] = {}
    for i in nodes:
        for column in facts.columns[i]:
            for k, b in enumerate(column):
                at = number[i, k]
                if b in joining:
                    sets.join(holder.setdefault(b, at), at)
                for x in facts.anchors(b, joining):
                    sets.join(holder.setdefault(x, at), at)
    lanes: dict[int, list[tuple[int, int]]] = {}
    for at, place in enumerate(places):
        lanes.setdefault(sets.find(at), []).append(place)
    frames: dict[tuple[int, ...], list[list[int]]] = {}
    for lane in lanes.values():
        members = tuple([i for i, _ in lane])
        if len(set(members)) < len(members):
            # several rows of one node: each is planned separately
            for i, k in lane:
                yield {i: [k]}
        else:
            frames.setdefault(members, []).append([k for _, k in lane])
    for members, rows in frames.items():
        yield dict(zip(members, map(list, zip(*rows, strict=True)), strict=True))


# ---------------------------------------------------------------- facts for rules


class _Facts:
    """Properties of rows that rules read, by column.

    `columns` has the columns of buffers of each node with several rows, equal ones as
    one object.
    """

    def __init__(
        self, graph: Graph, wide: Sequence[int], near: dict[int, list[int]]
    ) -> None:
        self.graph = graph
        self.near = near
        self.shared = shared_storages(graph.buffers)
        self.entry = frozenset(graph.initial)
        self.final = frozenset(graph.final)
        self.maker: dict[int, int] = {}
        #: the touches of a buffer outside of rows: (node, True for a write)
        self.outside: dict[int, tuple[tuple[int, bool], ...]] = {}
        self.columns: dict[int, list[Column]] = {}
        interned: dict[Column, Column] = {}
        inside = set(wide)
        for i, n in enumerate(graph.nodes):
            self.maker.update(dict.fromkeys(written_by(n), i))
            if i not in inside:
                for write, values in ((False, read_by(n)), (True, written_by(n))):
                    for v in values:
                        b = graph.values[v]
                        self.outside[b] = (*self.outside.get(b, ()), (i, write))
            elif isinstance(n, ForeachSchedulerNode):
                node_columns = [
                    tuple(map(graph.values.__getitem__, c))
                    for c in chain(n.reads, n.writes)
                ]
                self.columns[i] = [interned.setdefault(c, c) for c in node_columns]
        #: the position of a buffer that rows touch: (column, row)
        self.position: dict[int, tuple[int, int]] = {}
        if near:
            for c in interned:
                self.position.update((b, (id(c), k)) for k, b in enumerate(c))

    def joining(self, tied: frozenset[int]) -> frozenset[int]:
        """Return the buffers that join the rows that touch them into one lane."""
        joins = set(tied)
        for i, n in enumerate(self.graph.nodes):
            if isinstance(n, Extern):
                continue
            written = map(self.graph.values.__getitem__, written_by(n))
            if i in self.columns:
                joins.update(written)
            else:
                joins.update(b for b in written if self.graph.buffers[b].shape)
        return frozenset(joins)

    def anchors(self, b: int, joining: frozenset[int]) -> list[int]:
        """Return the joining buffers that share memory with b, including b.

        Returns none if b shares no memory.
        """
        near = self.near.get(b, ())
        return [x for x in (b, *near) if x in joining] if near else []

    def alike(self, frame: Frame) -> list[Frame]:
        """Split a frame into parts in which all lanes are alike."""
        rows = next(iter(frame.values()))
        if len(rows) == 1:
            return [frame]
        labels = [x for x in self._labels(frame) if len(set(x)) > 1]
        if not labels:
            return [frame]
        classes: dict[tuple[Any, ...], list[int]] = {}
        for k, label in enumerate(zip(*labels, strict=True)):
            classes.setdefault(label, []).append(k)
        return [
            {i: [rows_of_node[k] for k in part] for i, rows_of_node in frame.items()}
            for part in classes.values()
        ]

    def _labels(self, frame: Frame) -> Iterator[Sequence[Any]]:
        """Yield columns in which equal entries mean that rules see no difference."""
        graph = self.graph
        touched: dict[Column, None] = {}
        reduces = False
        for i, rows in frame.items():
            node = graph.nodes[i]
            assert isinstance(node, ForeachSchedulerNode)
            whole = rows == range(node.rows)
            node = node if whole else node.pick(rows)
            for v in node.reads:
                makers = list(map(self.maker.get, v))
                yield makers
                if None in makers:
                    yield list(map(self.entry.__contains__, v))
            for v in node.writes:
                yield list(map(self.final.__contains__, v))
            if node.body.reduction:
                reduces = True
                operands = map(graph.buffers.__getitem__, self.columns[i][0])
                orders = [memory_order(b.shape, b.stride) for b in operands]
                yield orders if whole else [orders[k] for k in rows]
            yield node.dims
            for c in self.columns[i]:
                touched[c if whole else tuple([c[k] for k in rows])] = None
        shapes: dict[tuple[Any, ...], None] = {}
        for c in touched:
            buffers = list(map(graph.buffers.__getitem__, c))
            yield [b.device for b in buffers]
            yield [b.kind == "temp" for b in buffers]
            shape = tuple([b.shape for b in buffers])
            shapes[shape] = None
            yield shape if reduces else list(map(bool, shape))
            yield from self._memory(c)
        for pairs in (shapes, touched):
            yield from _same(pairs)

    def _memory(self, c: Column) -> Iterator[Sequence[Any]]:
        """Yield further properties of a column's memory."""
        if self.shared:
            yield [self.graph.buffers[b].storage in self.shared for b in c]
        if not self.outside.keys().isdisjoint(c):
            yield list(map(self.outside.get, c))
        if not self.near.keys().isdisjoint(c):
            yield [self._near(b) for b in c]

    def _near(self, b: int) -> tuple[tuple[bool, int], ...]:
        """Return the overlaps of a buffer: columns in its own row, else buffers."""
        position = self.position[b][1]
        overlapping: list[tuple[bool, int]] = []
        for x in self.near.get(b, ()):
            column, row = self.position.get(x, (-1, -1))
            overlapping.append((True, column) if row == position else (False, x))
        return tuple(sorted(overlapping))


def _same(columns: Iterable[Sequence[Any]]) -> Iterator[Sequence[bool]]:
    """Yield where columns have the same entry at a row."""
    sets = [(c, frozenset(c)) for c in columns]
    if len(frozenset().union(*(s for _, s in sets))) < sum(len(s) for _, s in sets):
        for (a, x), (b, y) in combinations(sets, 2):
            if not x.isdisjoint(y):
                yield list(map(operator.eq, a, b))
