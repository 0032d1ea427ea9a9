"""Which stage a node runs in, where reductions are about. Graphs by hand, no torch.

`planned` proves every schedule to do what its graph does.
"""

from __future__ import annotations

import pytest

from fuseopt.ir import Kernel, Schedule, Variant

from .build_graphs import GraphBuilder, codes, kernels, planned


def variants(plan: Schedule) -> list[list[Variant]]:
    return [list(k.variants) for k in plan.steps if isinstance(k, Kernel)]


def test_elements_are_folded_in_the_kernel_that_makes_them() -> None:
    g = GraphBuilder()
    p, q = g.tensor("p", (3, 4)), g.tensor("q", (3, 4))
    g.op("add", p, q, out=p)
    g.outputs.append(g.reduce("norm2", p))
    _, plan = planned(g)
    ((v,),) = variants(plan)
    assert v.reduction == "full"
    assert [v.instrs[i].op for i in v.output_code] == ["sumsq"]
    assert {s.domain for s in v.slots} == {"element", "output"}


def test_what_needs_the_result_per_element_waits() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    g.op("div", p, g.reduce("norm2", p), out=p)
    _, plan = planned(g)
    assert len(kernels(plan)) == 2
    assert "reduction" in codes(plan)


def test_what_is_done_to_results_runs_in_the_same_kernel() -> None:
    g = GraphBuilder()
    p, row = g.tensor("p", (3, 4)), g.tensor("row", (3,))
    mean = g.op("mul", g.reduce("sum", p, (1,)), 0.25)
    g.op("add", row, mean, out=row)
    _, plan = planned(g)
    ((v,),) = variants(plan)
    assert v.reduction == "dims"
    assert [v.instrs[i].op for i in v.output_code] == ["sum", "mul", "load", "add"]
    assert v.reduced == ((1,),)


def test_rows_and_columns_of_what_is_made_do_not_share_a_lane() -> None:
    g = GraphBuilder()
    p, q = g.tensor("p", (3, 4)), g.tensor("q", (3, 4))
    g.op("add", p, q, out=p)
    g.outputs += [g.reduce("sum", p, (0,)), g.reduce("sum", p, (1,))]
    _, plan = planned(g)
    assert len(kernels(plan)) == 2
    assert "reduction" in codes(plan)


def test_rows_and_columns_of_what_is_there_share_a_launch() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    g.outputs += [g.reduce("sum", p, (0,)), g.reduce("sum", p, (1,))]
    _, plan = planned(g)
    ((v,),) = variants(plan)
    assert v.lanes == 2
    assert v.reduced == ((0,), (1,))


def test_a_reduction_of_results_waits() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    g.outputs.append(g.reduce("sum", g.reduce("sum", p, (1,))))
    _, plan = planned(g)
    assert len(kernels(plan)) == 2


@pytest.mark.parametrize("lanes", [2, 30])
def test_lanes_that_do_alike_are_one_variant_a_stage(lanes: int) -> None:
    g = GraphBuilder()
    for i in range(lanes):
        p, m = g.tensor(f"p{i}", (3, 4 + i)), g.tensor(f"m{i}", (3, 4 + i))
        g.op("add", m, p, out=m)
        ratio = g.op("div", g.reduce("norm2", p), g.reduce("norm2", m))
        g.op("mul", m, ratio, out=m)
    _, plan = planned(g)
    assert [[v.lanes for v in k] for k in variants(plan)] == [[lanes], [lanes]]


def test_a_number_that_few_lanes_give_is_finished_by_them() -> None:
    """More of them, as of a loop over all parameters, have a kernel of their own."""
    for lanes, launches in ((2, 2), (9, 3)):
        g = GraphBuilder()
        ps = [g.tensor(f"p{i}", (3, 4)) for i in range(lanes)]
        total = g.reduce("norm2", ps[0])
        for p in ps[1:]:
            total = g.op("add", total, g.reduce("norm2", p))
        for p in ps:
            g.op("div", p, total, out=p)
        _, plan = planned(g)
        assert len(kernels(plan)) == launches
