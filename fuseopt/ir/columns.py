"""Merge recorded nodes, one for each list index, into nodes with a row for each.

Here lanes are recognized as alike, once. The positions of one foreach call become rows
of one node. So do the iterations of a loop over lanes that run the same bodies on
disjoint memory. Rows that depend on one another stay separate nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, groupby

from .alias import overlaps
from .graph import (
    Buffer,
    Column,
    Extern,
    ForeachSchedulerNode,
    Node,
    Row,
    SchedulerNode,
    read_by,
    written_by,
)
from .sets import UnionFind

#: A node during the merge: with its columns, or one row without columns.
Part = Row | ForeachSchedulerNode


def columns(
    recorded: Iterable[Row], values: Sequence[int], buffers: Sequence[Buffer]
) -> tuple[Node, ...]:
    """Merge recorded nodes, in program order, into the nodes of an equivalent Graph."""
    near = overlaps(buffers)
    parts: list[Part] = []
    for _, call in groupby(recorded, _call):
        first, *others = call
        if others and isinstance(first, SchedulerNode):
            rows = [first, *(n for n in others if isinstance(n, SchedulerNode))]
            parts += _of_call(rows, values, near)
        else:
            parts.append(first)
    parts = _of_loops(parts, values, buffers)
    return tuple([stacked([n]) if isinstance(n, SchedulerNode) else n for n in parts])


def _call(node: Row) -> tuple[bool, int]:
    """Return a key that the positions of one call share, and no other nodes."""
    alone = isinstance(node, Extern)
    return alone, node.payload if isinstance(node, Extern) else node.call


def stacked(rows: Sequence[SchedulerNode]) -> ForeachSchedulerNode:
    """Merge recorded nodes of one body into one node with a row for each."""
    _, reads, scalars, writes, _, _, dims = zip(*rows, strict=True)
    first = rows[0]
    return ForeachSchedulerNode(
        first.body,
        tuple(zip(*reads, strict=True)),
        tuple(zip(*scalars, strict=True)),
        tuple(zip(*writes, strict=True)),
        first.call,
        first.line,
        dims if first.body.reduction else (),
    )


# ---------------------------------------------------------------- calls of lists


def _of_call(
    rows: Sequence[SchedulerNode], values: Sequence[int], near: dict[int, list[int]]
) -> list[Part]:
    """Return the nodes of one call: one, unless positions differ or share memory."""
    if all(n.body is rows[0].body for n in rows):
        node = stacked(rows)
        if _independent(node, values, near):
            return [node]
    groups = _in_order(rows, values, near)
    return [stacked(group) if len(group) > 1 else group[0] for group in groups]


def _independent(
    node: ForeachSchedulerNode, values: Sequence[int], near: dict[int, list[int]]
) -> bool:
    """Is it certain that no row touches memory that another row writes?"""

    def memory(columns: Iterable[Column]) -> list[Column]:
        return [tuple([values[v] for v in c]) for c in columns]

    read, written = memory(node.reads), memory(node.writes)
    every = set().union(*written)
    if len(every) < sum(map(len, written)):
        return False
    if not all(c in written or every.isdisjoint(c) for c in read):
        return False
    if near.keys().isdisjoint(every):
        return True
    touched = every.union(*read)
    return all(touched.isdisjoint(near.get(b, ())) for b in every)


def _in_order(
    rows: Sequence[SchedulerNode], values: Sequence[int], near: dict[int, list[int]]
) -> list[list[SchedulerNode]]:
    """Group nodes of one body, each group after all groups that it depends on."""
    groups: list[list[SchedulerNode]] = []
    last: dict[int, int] = {}  # by body
    wrote: dict[int, int] = {}  # buffer -> the last group that wrote it
    touched: dict[int, int] = {}
    for n in rows:
        read, written = [values[v] for v in n.reads], [values[v] for v in n.writes]
        behind = -1
        for b in chain(read, written):
            for x in (b, *near.get(b, ())):
                behind = max(behind, wrote.get(x, -1))
        for b in written:
            for x in (b, *near.get(b, ())):
                behind = max(behind, touched.get(x, -1))
        at = last.get(id(n.body), -1)
        if at <= behind:
            at = last[id(n.body)] = len(groups)
            groups.append([])
        groups[at].append(n)
        for b in chain(read, written):
            touched[b] = max(at, touched.get(b, -1))
        for b in written:
            wrote[b] = max(at, wrote.get(b, -1))
    return groups


# ---------------------------------------------------------------- loops over lanes


def _of_loops(
    parts: list[Part], values: Sequence[int], buffers: Sequence[Buffer]
) -> list[Part]:
    """Merge equal iterations of a loop into the rows of one node; keep other nodes."""
    bodies = Counter([id(n.body) for n in parts if isinstance(n, SchedulerNode)])
    if max(bodies.values(), default=0) < 2:
        return parts
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    for island in _islands(parts, values, buffers):
        form = _form([parts[i] for i in island])
        if form is not None:
            alike.setdefault(form, []).append(island)
    joined: dict[int, Part] = {}
    gone: set[int] = set()
    for islands in alike.values():
        if len(islands) > 1:
            for places in zip(*islands, strict=True):
                members = [parts[i] for i in places]
                rows = [n for n in members if isinstance(n, SchedulerNode)]
                joined[places[0]] = stacked(rows)
                gone.update(places[1:])
    return [joined.get(i, n) for i, n in enumerate(parts) if i not in gone]


def _islands(
    parts: Sequence[Part], values: Sequence[int], buffers: Sequence[Buffer]
) -> list[list[int]]:
    """Return groups of nodes that share written memory, by their first node.

    Nodes of two islands are independent, so they may run in any order.
    """
    storage = [b.storage for b in buffers]
    written = {storage[values[v]] for n in parts for v in _writes(n)}
    numbers = {s: k for k, s in enumerate(written)}
    #: the number of each value's storage; -1 if nothing writes it
    place = [numbers.get(storage[b], -1) for b in values]
    sets = UnionFind(len(numbers) + 1)
    ordered = len(numbers)  # a pseudo-storage that all ordered calls touch
    at: list[int] = []
    for n in parts:
        touched = [place[v] for v in _writes(n)]
        touched += [k for v in _reads(n) if (k := place[v]) >= 0]
        if isinstance(n, Extern) and (n.ordered or not touched):
            touched.append(ordered)
        first = touched[0]
        for other in touched:
            if sets.parent[other] != sets.parent[first]:
                sets.join(first, other)
        at.append(first)
    islands: dict[int, list[int]] = {}
    for i, first in enumerate(at):
        islands.setdefault(sets.find(first), []).append(i)
    return list(islands.values())


def _reads(part: Part) -> Iterable[int]:
    return part.reads if isinstance(part, SchedulerNode) else read_by(part)


def _writes(part: Part) -> Iterable[int]:
    return part.writes if isinstance(part, SchedulerNode) else written_by(part)


def _form(island: Sequence[Part]) -> tuple[int, ...] | None:
    """Return a key of an island's bodies and value pattern.

    Values are counted from the island's first. Returns None if it is no iteration of a
    loop.
    """
    form: list[int] = []
    local: dict[int, int] = {}
    for n in island:
        if not isinstance(n, SchedulerNode):
            return None
        form.append(id(n.body))
        for v in n.reads:
            form.append(local.setdefault(v, len(local)))
        for v in n.writes:
            form.append(local.setdefault(v, len(local)))
    return tuple(form)
