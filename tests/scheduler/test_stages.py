"""Which stage a node runs in, where reductions are about. Graphs by hand, no torch.

`planned` proves every schedule to do what its graph does.
"""

from __future__ import annotations

import pytest

from fuseopt.ir.graph import Kernel, Schedule, Variant
from tests.build_graphs import GraphBuilder, codes, kernels, planned


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


def stored(v: Variant) -> int:
    """How many tensors a variant writes element by element."""
    return sum(s.write and s.domain == "element" for s in v.slots)


def test_what_scales_one_tensor_waits_for_who_reads_it() -> None:
    """A moment decays where the clipped gradient is added to it, not before: it is
    read and written once.
    """
    g = GraphBuilder()
    m, grad = g.tensor("m", (3, 4)), g.tensor("g", (3, 4))
    norm = g.reduce("norm2", grad)
    g.op("mul", g.op("mul", m, 0.5), 2.0, out=m)
    g.op("add", m, g.op("div", grad, norm), out=m)
    _, plan = planned(g)
    (first,), (last,) = variants(plan)
    assert (stored(first), stored(last)) == (0, 1)


def test_what_is_read_before_it_is_scaled_stays_what_it_was() -> None:
    g = GraphBuilder()
    m, grad = g.tensor("m", (3, 4)), g.tensor("g", (3, 4))
    g.outputs.append(g.reduce("norm2", m))
    norm = g.reduce("norm2", grad)
    g.op("mul", m, 0.5, out=m)
    g.op("add", m, g.op("div", grad, norm), out=m)
    _, plan = planned(g)
    assert [sum(map(stored, k)) for k in variants(plan)] == [0, 1]


def test_what_reads_two_tensors_does_not_wait() -> None:
    g = GraphBuilder()
    a, b, p = (g.tensor(x, (3, 4)) for x in "abp")
    both = g.op("add", a, b)
    g.op("add", both, g.op("div", p, g.reduce("norm2", p)), out=p)
    _, plan = planned(g)
    assert [sum(map(stored, k)) for k in variants(plan)] == [1, 1]


def test_what_a_reduction_reads_does_not_wait_for_others() -> None:
    """It is folded in the first kernel, and scaled there."""
    g = GraphBuilder()
    p = g.tensor("p", (3, 4))
    half = g.op("mul", p, 0.5)
    norm = g.reduce("norm2", half)
    g.op("div", half, norm, out=p)
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
    """More of them, as of a loop over all parameters, by the launch that has all."""
    for lanes, finished in ((2, 0), (9, 1)):
        g = GraphBuilder()
        ps = [g.tensor(f"p{i}", (3, 4)) for i in range(lanes)]
        total = g.reduce("norm2", ps[0])
        for p in ps[1:]:
            total = g.op("add", total, g.reduce("norm2", p))
        for p in ps:
            g.op("div", p, total, out=p)
        _, plan = planned(g)
        first, last = kernels(plan)
        assert (len(first.finish), last.finish) == (finished, ())


# ---------------------------------------------------------------- numbers of all lanes


def stacked(g: GraphBuilder, ps: list[int], dims: tuple[int, ...] | None = None) -> int:
    """The norms of tensors, or the sums of the rows of the first, side by side."""
    stack = g.tensor("stack", (len(ps),), kind="temp")
    for i, p in enumerate(ps):
        piece = g.tensor(f"norm{i}", (), kind="temp", offset=i, storage=stack)
        g.op("copy", g.reduce("norm2", p, dims), out=piece)
    return stack


def finished(plan: Schedule) -> list[list[int]]:
    """How many variants each kernel has, and how many of them at its end."""
    return [[len(k.variants), len(k.finish)] for k in kernels(plan)]


@pytest.mark.parametrize("lanes", [2, 30])
def test_a_number_of_all_lanes_is_made_in_the_launch_of_theirs(lanes: int) -> None:
    g = GraphBuilder()
    ps = [g.tensor(f"p{i}", (3, 4 + i)) for i in range(lanes)]
    total = g.reduce("norm2", stacked(g, ps))
    g.foreach("div", ps, total)
    _, plan = planned(g)
    assert finished(plan) == [[1, 1], [1, 0]]
    (total_norm,) = kernels(plan)[0].finish
    assert (total_norm.lanes, total_norm.shapes) == (1, ((lanes,),))


def test_what_an_extern_changes_in_between_is_waited_for() -> None:
    g = GraphBuilder()
    ps = [g.tensor(f"p{i}", (3, 4)) for i in range(3)]
    stack = stacked(g, ps)
    g.extern("shuffle", [stack], [stack])
    g.outputs.append(g.reduce("norm2", stack))
    _, plan = planned(g)
    assert finished(plan) == [[1, 0], [1, 0]]


def test_what_lanes_of_elements_read_is_not_changed_in_their_launch() -> None:
    """Nobody knows when such a lane is done."""
    for same_launch in (True, False):
        g = GraphBuilder()
        ps = [g.tensor(f"p{i}", (3, 4)) for i in range(3)]
        q, r, total = g.tensor("q", (50,)), g.tensor("r", (50,)), g.tensor("total", ())
        if same_launch:
            g.op("mul", q, total, out=q)
            g.op("mul", r, total, out=r)
        g.op("copy", g.reduce("norm2", stacked(g, ps)), out=total)
        _, plan = planned(g)
        assert len(kernels(plan)) == 1 + same_launch
        assert sum(len(k.finish) for k in kernels(plan)) == 1 - same_launch


def test_what_has_elements_of_its_own_has_a_launch_of_its_own() -> None:
    g = GraphBuilder()
    ps = [g.tensor(f"p{i}", (3, 4)) for i in range(3)]
    norms, big = stacked(g, ps), g.tensor("big", (3,))
    g.op("add", big, norms, out=big)
    _, plan = planned(g)
    assert finished(plan) == [[1, 0], [1, 0]]


def test_more_than_a_few_lanes_do_not_wait_in_one_program() -> None:
    for totals, launches in ((2, 1), (9, 2)):
        g = GraphBuilder()
        ps = [g.tensor(f"p{i}", (3, 4)) for i in range(3)]
        stack = stacked(g, ps)
        for k in range(totals):
            part = g.tensor(f"part{k}", (2,), kind="temp", offset=0, storage=stack)
            g.outputs.append(g.op("mul", g.reduce("sum", part), float(k + 2)))
        _, plan = planned(g)
        assert len(kernels(plan)) == launches


# ------------------------------------------------------------- several devices


def test_a_counter_of_the_cpu_does_not_tear_the_pass_of_a_device_apart() -> None:
    g = GraphBuilder()
    p, q = (g.tensor(x, (4,), device="sim:0") for x in "pq")
    step = g.tensor("step", ())
    g.op("mul", q, 0.9, out=q)
    g.op("add", step, 1.0, out=step)
    root = g.op("sqrt", step)
    g.op("div", q, root, out=p)
    graph, plan = planned(g)
    host, device = kernels(plan)
    assert {graph.buffers[b].name for c in host.variants[0].columns for b in c} == {
        "step",
        graph.buffers[root].name,
    }
    # one pass over q, which reads the root that the first kernel has made
    assert device.variants[0].nodes == ("mul", "div")
    assert root in {b for column in device.variants[0].columns for b in column}
    assert "device" in codes(plan)


def test_a_counter_that_a_device_reads_first_changes_after_it() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,), device="sim:0")
    step = g.tensor("step", ())
    g.op("mul", p, step, out=p)
    g.op("add", step, 1.0, out=step)
    g.op("add", p, step, out=p)
    graph, plan = planned(g)
    written = [graph.buffers[k.variants[0].columns[0][0]].device for k in kernels(plan)]
    assert written == ["sim:0", "cpu", "sim:0"]
