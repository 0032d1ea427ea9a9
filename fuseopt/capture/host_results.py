"""Find the results of a captured step that the host computes before the launch.

Dynamo returns a float that a step computed in a 0-d float64 tensor. Its code reads that
tensor as soon as the graph has run. If the step only fills the tensor with a number of
the host, the host writes it. The read then need not wait for the launch.
"""

from __future__ import annotations

from collections.abc import Collection

from ..ir.graph import Graph, Literal, ScalarRef, SchedulerNode, Symbol, rows_of
from .results import leaves, result_buffers
from .scalars.device import NumberRef
from .trace import Captured


def host_results(captured: Captured) -> dict[int, ScalarRef]:
    """Return the number that fills each float64 result without dimensions, by its
    buffer.
    """
    graph = captured.graph
    written = {
        graph.final[b]: b
        for b in result_buffers(captured.result)
        if _is_number(graph, b) and _is_alone(graph, b)
    }
    if not written:
        return {}
    found = {}
    for node in graph.nodes:
        for row in rows_of(node):
            if isinstance(row, SchedulerNode) and row.writes[0] in written:
                scalar = _filling(row)
                if scalar is not None:
                    found[written[row.writes[0]]] = scalar
    return found


def read_at_once(captured: Captured, known: Collection[int]) -> bool:
    """Does the caller of the graph immediately read results that kernels compute?

    `known`: the buffers of `host_results`.
    """
    graph, result = captured.graph, captured.result
    numbers = {b for b in result_buffers(result) if _is_number(graph, b)}
    return not numbers <= {*known} or any(
        isinstance(x, NumberRef) for x in leaves(result)
    )


def _is_number(graph: Graph, b: int) -> bool:
    return graph.buffers[b].dtype == "f64" and not graph.buffers[b].shape


def _is_alone(graph: Graph, b: int) -> bool:
    """Is a buffer a temp that shares its storage with no other buffer?"""
    storage = graph.buffers[b].storage
    sharing = sum(x.storage == storage for x in graph.buffers)
    return graph.buffers[b].kind == "temp" and sharing == 1


def _filling(row: SchedulerNode) -> ScalarRef | None:
    """Return the number with which a row fills its result; None if it does more."""
    body = row.body
    is_fill = (
        not row.reads
        and len(row.writes) == 1
        and [x.op for x in body.instrs] == ["scalar"]
        and body.instrs[0].dtype == "f64"
    )
    scalar = row.scalars[0] if is_fill and len(row.scalars) == 1 else None
    return scalar if isinstance(scalar, (Literal, Symbol)) else None
