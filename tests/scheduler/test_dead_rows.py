"""Results that nobody reads, and what overwrites them. Graphs by hand, no torch.

`planned` proves every schedule to do what its graph does.
"""

from __future__ import annotations

from fuseopt.scheduler.dead_rows import without_dead_rows
from tests.build_graphs import GraphBuilder, kernels, planned


def test_what_overwrites_a_result_is_no_part_of_its_reduction() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    total = g.reduce("sum", p)
    g.op("fill", 2.0, out=total)
    g.outputs.append(total)
    graph, plan = planned(g)
    assert len(graph.nodes) == 2
    assert len(without_dead_rows(graph).nodes) == 1
    (kernel,) = kernels(plan)
    assert [v.reduction for v in kernel.variants] == [""]


def test_a_chain_of_which_nobody_reads_the_end_is_dropped() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    g.op("mul", g.reduce("norm2", p), 0.5)
    g.op("mul", p, 2.0, out=p)
    graph, _ = planned(g)
    assert len(without_dead_rows(graph).nodes) == 1


def test_rows_that_are_read_stay() -> None:
    g = GraphBuilder()
    lanes = [g.tensor(f"p{k}", (3, 4)) for k in range(3)]
    results = g.foreach("mul", lanes, 2.0, inplace=False)
    g.outputs.append(results[1])
    graph, _ = planned(g)
    (node,) = without_dead_rows(graph).nodes
    assert graph.values[node.row(0).writes[0]] == results[1]  # type: ignore[union-attr]


def test_nothing_is_dropped_where_all_is_read() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    g.op("div", p, g.reduce("norm2", p), out=p)
    graph, _ = planned(g)
    assert without_dead_rows(graph) is graph
