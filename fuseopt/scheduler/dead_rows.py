"""Remove rows of nodes whose results are never read.

Otherwise such a result of a reduction, overwritten before any read, would tie its
overwriting node to the reduction's lane. That node's result would be stored as one of a
lane which, once dead instructions are gone, reduces nothing.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.alias import overlaps
from ..ir.graph import Extern, Graph, Node, read_by


def without_dead_rows(graph: Graph) -> Graph:
    """Drop rows whose results are neither read nor kept, until there are none.

    Results in memory that other buffers share are left: those buffers may read them.
    """
    while True:
        live = {v for n in graph.nodes for v in read_by(n)}
        live.update(graph.final)
        if not any(_dead_rows(n, live) for n in graph.nodes):
            return graph
        shared = overlaps(graph.buffers)
        live.update(v for v, b in enumerate(graph.values) if shared.get(b))
        nodes = [_without(n, _dead_rows(n, live)) for n in graph.nodes]
        fewer = tuple([n for n in nodes if n is not None])
        if fewer == graph.nodes:
            return graph
        graph = replace(graph, nodes=fewer)


def _dead_rows(node: Node, live: set[int]) -> set[int]:
    """Return the rows of a node that write no value among `live`."""
    if isinstance(node, Extern) or any(map(live.issuperset, node.writes)):
        return set()
    return {k for k in range(node.rows) if live.isdisjoint(c[k] for c in node.writes)}


def _without(node: Node, dead: set[int]) -> Node | None:
    """Return a node without some rows; None without all of them."""
    if not dead or isinstance(node, Extern):
        return node
    if len(dead) == node.rows:
        return None
    return node.pick([k for k in range(node.rows) if k not in dead])
