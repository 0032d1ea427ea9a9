"""Recorded positions -> nodes with a row for each list index, by hand. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseopt.ir.columns import stacked
from fuseopt.ir.graph import Extern, ForeachSchedulerNode, Graph, SchedulerNode
from fuseopt.ir.verifier import check_graph, check_schedule
from fuseopt.scheduler import schedule
from tests.build_graphs import GraphBuilder


def shape_of(graph: Graph) -> list[tuple[str, int]]:
    """Each node's name, and how many rows it has."""
    return [
        (n.name, 1) if isinstance(n, Extern) else (n.body.name, n.rows)
        for n in graph.nodes
    ]


def each_alone(g: GraphBuilder) -> Graph:
    """The graph with a node for each position, as it was recorded."""
    nodes = [stacked([n]) if isinstance(n, SchedulerNode) else n for n in g.nodes]
    return replace(g.graph(), nodes=tuple(nodes))


def nodes(g: GraphBuilder) -> list[tuple[str, int]]:
    """The nodes of a graph that is proven to do what was recorded."""
    graph = g.graph()
    check_graph(each_alone(g))
    check_schedule(each_alone(g), schedule(graph))
    return shape_of(graph)


def test_a_call_of_lists_is_one_node() -> None:
    g = GraphBuilder()
    shapes = [(3,), (2, 2, 2), (4, 5)]
    p, grad = g.tensors("p", shapes), g.tensors("g", shapes)
    g.foreach("add", p, grad, [0.5, 0.25, 0.5])
    assert nodes(g) == [("add", 3)]
    (node,) = g.graph().nodes
    assert isinstance(node, ForeachSchedulerNode)
    assert [[g.buffers[g.values[v]].name for v in c] for c in node.reads] == [
        ["p0", "p1", "p2"],
        ["g0", "g1", "g2"],
    ]
    assert [ref.value for ref in node.scalars[0]] == [0.5, 0.25, 0.5]  # type: ignore[union-attr]
    assert node.row(1) == g.nodes[1]
    assert node.pick([2, 0]).row(1) == g.nodes[0]


def test_a_call_of_several_dtypes_is_a_node_for_each() -> None:
    g = GraphBuilder()
    kinds = ("f32", "bf16", "f32", "bf16", "f32")
    p = [g.tensor(f"p{i}", (4,), dtype) for i, dtype in enumerate(kinds)]
    g.foreach("mul", p, 2.0)
    assert nodes(g) == [("mul", 3), ("mul", 2)]


def test_the_same_tensor_twice_is_two_nodes() -> None:
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,), (4,)])
    g.foreach("add", [p, q, p], g.tensors("g", [(4,)] * 3), 1.0)
    assert nodes(g) == [("add", 2), ("add", 1)]


def test_a_row_that_reads_what_another_writes_comes_behind_it() -> None:
    g = GraphBuilder()
    p, q, r = g.tensors("p", [(4,)] * 3)
    g.foreach("add", [p, q, r], [r, p, p], 1.0)
    assert nodes(g) == [("add", 1), ("add", 2)]


@pytest.mark.parametrize(("step", "rows"), [(4, [3]), (2, [1, 1, 1])])
def test_views_of_one_tensor(step: int, rows: list[int]) -> None:
    """Side by side they are rows; where they overlap they have an order."""
    g = GraphBuilder()
    flat = g.tensor("flat", (16,))
    g.foreach("mul", [g.view(flat, f"v{k}", (4,), step * k) for k in range(3)], 2.0)
    assert nodes(g) == [("mul", n) for n in rows]


def test_reductions_of_other_dimensions_are_rows_of_one_node() -> None:
    g = GraphBuilder()
    p = g.tensors("p", [(3, 4), (5,), (2, 2, 2)])
    call = g._next_call()
    for x in p:
        g._calls = call - 1
        g.outputs.append(g.reduce("norm2", x))
    assert nodes(g) == [("norm2", 3)]
    (node,) = g.graph().nodes
    assert isinstance(node, ForeachSchedulerNode)
    assert node.dims == ((0, 1), (0,), (0, 1, 2))


def loop(g: GraphBuilder, lanes: int) -> list[int]:
    """Momentum, one parameter after the other."""
    tensors = [g.tensors(name, [(3 + i,) for i in range(lanes)]) for name in "pmg"]
    for p, m, grad in zip(*tensors, strict=True):
        g.op("mul_rounded", m, 0.9, out=m)
        g.op("add", m, grad, 1.0, out=m)
        g.op("add", p, m, -0.1, out=p)
    return tensors[0]


def test_rounds_of_a_loop_are_rows() -> None:
    g = GraphBuilder()
    loop(g, 3)
    assert nodes(g) == [("mul_rounded", 3), ("add", 3), ("add", 3)]


def test_rounds_with_several_nodes_of_one_call_are_rows() -> None:
    """A norm is a sum of squares and its root."""
    g = GraphBuilder()
    for p in g.tensors("p", [(3,), (4,), (5,)]):
        norm = g.reduce("norm2", p)
        g.outputs.append(g.op("sqrt", norm, call=g._calls))
    assert nodes(g) == [("norm2", 3), ("sqrt", 3)]


def test_rounds_that_do_something_else_are_apart() -> None:
    g = GraphBuilder()
    p = loop(g, 3)
    g.op("mul", p[1], 2.0, out=p[1])
    assert nodes(g) == [
        ("mul_rounded", 2),
        ("add", 2),
        ("add", 2),
        ("mul_rounded", 1),
        ("add", 1),
        ("add", 1),
        ("mul", 1),
    ]


def test_rounds_that_depend_on_one_another_keep_their_order() -> None:
    g = GraphBuilder()
    p = g.tensors("p", [(4,)] * 3)
    total = g.tensor("total", (4,))
    for x in p:
        g.op("add", total, x, 1.0, out=total)
        g.op("mul", x, total, out=x)
    assert nodes(g) == [("add", 1), ("mul", 1)] * 3


def test_a_call_of_a_loop_that_stays_is_no_row() -> None:
    g = GraphBuilder()
    p = loop(g, 3)
    g.extern("aten.special", [p[0]], [p[0]])
    assert nodes(g)[:3] == [("mul_rounded", 1), ("add", 1), ("add", 1)]
    assert nodes(g)[-1] == ("aten.special", 1)
