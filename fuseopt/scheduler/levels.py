"""Levels of adjacent externs, by their dependencies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..ir.graph import Batch, Extern, Graph


class Levels(NamedTuple):
    """Levels of externs.

    `members[k]`: the externs of level k, which depend only on those of lower levels.
    `needs[i]`: the externs on which extern i depends, in order.
    """

    members: list[list[int]]
    needs: list[list[int]]


def in_levels(
    graph: Graph, externs: Sequence[Extern], near: Mapping[int, Sequence[int]]
) -> Levels:
    """Return the Levels of externs in program order. `near`: overlaps of buffers."""
    values = graph.values
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    level: list[int] = []
    needs: list[list[int]] = []
    ordered = -1
    for i, e in enumerate(externs):
        before: set[int] = {ordered} if e.ordered and ordered >= 0 else set()
        for v in e.reads:
            for b in (values[v], *near.get(values[v], ())):
                before |= {writer[b]} if b in writer else set()
        for v in e.writes:
            for b in (values[v], *near.get(values[v], ())):
                before |= {writer[b]} if b in writer else set()
                before |= {*readers.get(b, ())}
        for v in e.reads:
            readers.setdefault(values[v], []).append(i)
        for v in e.writes:
            writer[values[v]] = i
            readers[values[v]] = []
        if e.ordered:
            ordered = i
        before.discard(i)
        needs.append(sorted(before))
        level.append(1 + max((level[k] for k in before), default=-1))
    members: list[list[int]] = [[] for _ in range(1 + max(level, default=-1))]
    for i, at in enumerate(level):
        members[at].append(i)
    return Levels(members, needs)


def in_order(
    externs: Sequence[Extern],
    batch_of: Mapping[int, Batch],
    needs: Sequence[Sequence[int]],
) -> Iterator[Extern | Batch]:
    """Yield externs in program order, each batch as one once one of its rows is due.

    Externs that the other rows need come before the batch.
    """
    place = {e.payload: i for i, e in enumerate(externs)}
    done: set[int] = set()
    for start in range(len(externs)):
        waiting = [start]
        while waiting:
            i = waiting[-1]
            batch = batch_of.get(i)
            rows = [i] if batch is None else [place[e.payload] for e in batch.externs]
            missing = [k for r in rows for k in needs[r] if k not in done]
            if i in done or not missing:
                waiting.pop()
                if i not in done:
                    yield externs[i] if batch is None else batch
                    done.update(rows)
                continue
            waiting += reversed(missing)
