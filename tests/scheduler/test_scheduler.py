"""Whole graphs, built by hand, through the scheduler. No torch.

`planned` verifies every schedule: `check_schedule` proves that it leaves in memory what
the graph leaves.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.errors import GraphError
from fuseopt.ir.alias import overlaps
from fuseopt.ir.graph import Extern, Kernel, Schedule, Symbol, Variant
from fuseopt.ir.printer import show_graph, show_schedule
from fuseopt.ir.verifier import check_schedule
from fuseopt.scheduler import Machine, schedule
from tests.build_graphs import (
    GraphBuilder,
    adaptive,
    codes,
    kernels,
    momentum,
    opcodes,
    planned,
    same_variant,
)

SHAPES = [(3, 4), (5,), (2, 2, 2)]


def only_variant(plan: Schedule) -> Variant:
    (step,) = plan.steps
    assert isinstance(step, Kernel)
    (variant,) = step.variants
    return variant


def names(g: GraphBuilder, buffers: Any) -> list[str]:
    return [g.buffers[b].name for b in buffers]


# ---------------------------------------------------------------- one kernel


def test_a_chain_of_foreach_calls_is_one_variant() -> None:
    g = momentum(SHAPES)
    _, plan = planned(g)
    v = only_variant(plan)
    assert v.lanes == 3
    assert v.shapes == tuple(SHAPES)
    assert v.nodes == ("mul_rounded", "add", "add")
    assert [names(g, c) for c in v.columns] == [
        ["m0", "m1", "m2"],
        ["g0", "g1", "g2"],
        ["p0", "p1", "p2"],
    ]
    assert [(s.read, s.write) for s in v.slots] == [
        (True, True),
        (True, False),
        (True, True),
    ]
    assert plan.refusals == ()
    assert plan.temps == ()


def test_lane_numbers_never_cost_work_per_element() -> None:
    _, plan = planned(adaptive(SHAPES))
    v = only_variant(plan)
    element = [v.instrs[i].op for i in v.code]
    assert "pow" not in element
    assert element.count("vsqrt") == 1
    assert sum(s.domain == "lane" for s in v.slots) == 1


def test_dead_temps_are_not_stored() -> None:
    g = adaptive(SHAPES)
    _, plan = planned(g)
    v = only_variant(plan)
    kinds = {g.buffers[b].kind for column in v.columns for b in column}
    assert kinds == {"static"}
    assert plan.temps == ()


def test_a_returned_temp_is_stored() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    half = g.foreach("mul", p, 0.5, inplace=False)
    g.foreach("add", p, half, 1.0)
    g.outputs.append(half[1])
    _, plan = planned(g)
    assert plan.temps == (half[1],)
    (kernel,) = kernels(plan)
    assert sorted(v.lanes for v in kernel.variants) == [1, 2]


def test_a_step_that_changes_nothing_has_no_kernel() -> None:
    g = GraphBuilder()
    g.foreach("mul", g.tensors("p", SHAPES), 2.0, inplace=False)
    _, plan = planned(g)
    assert plan.steps == ()


def test_an_empty_graph() -> None:
    _, plan = planned(GraphBuilder())
    assert plan.steps == ()


def test_lists_of_different_length() -> None:
    """One list updates three tensors, another two of them: two bodies, one kernel."""
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    grad = g.tensors("g", SHAPES)
    g.foreach("mul", p, 0.9)
    g.foreach("add", p[:2], grad[:2], 1.0)
    _, plan = planned(g)
    (kernel,) = kernels(plan)
    assert sorted(v.lanes for v in kernel.variants) == [1, 2]


def test_permuted_lists() -> None:
    """The second call has the same tensors in another order: lanes still match up."""
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    grad = g.tensors("g", SHAPES)
    order = [2, 0, 1]
    g.foreach("mul", p, 0.9)
    g.foreach("add", [p[i] for i in order], [grad[i] for i in order], 1.0)
    _, plan = planned(g)
    v = only_variant(plan)
    assert [names(g, c) for c in v.columns] == [["p0", "p1", "p2"], ["g0", "g1", "g2"]]


def test_the_same_tensor_twice_in_a_list() -> None:
    """Added to twice, in order, by one lane."""
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,), (4,)])
    grads = g.tensors("g", [(4,)] * 3)
    g.foreach("add", [p, q, p], grads, 1.0)
    _, plan = planned(g)
    (kernel,) = kernels(plan)
    by_nodes = {v.nodes: v for v in kernel.variants}
    assert by_nodes["add", "add"].lanes == by_nodes["add",].lanes == 1
    twice = by_nodes["add", "add"]
    assert [i.op for i in twice.instrs].count("add") == 2
    assert len(twice.stores) == 1


def test_two_groups_with_other_scalars_are_two_rows_of_one_variant() -> None:
    g = momentum(SHAPES, lr=0.1)
    momentum([(7,), (3, 4)], lr=0.5, beta=0.8, g=g, name="second_")
    _, plan = planned(g)
    v = only_variant(plan)
    assert v.lanes == 5
    rows = {tuple(ref.value for ref in row) for row in zip(*v.scalars, strict=True)}
    assert rows == {(0.9, -0.1), (0.8, -0.5)}


def test_a_symbolic_scalar_is_a_column_too() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    g.foreach("mul", p[:2], Symbol(0))
    g.foreach("mul", p[2:], 0.5)
    _, plan = planned(g)
    assert only_variant(plan).scalars[0][:2] == (Symbol(0), Symbol(0))


def test_bf16_and_f32_lanes_are_two_variants_of_one_kernel() -> None:
    g = momentum(SHAPES)
    momentum(SHAPES, dtype="bf16", g=g, name="half_")
    _, plan = planned(g)
    (kernel,) = kernels(plan)
    assert sorted(v.slots[0].dtype for v in kernel.variants) == ["bf16", "f32"]
    assert kernel.lanes == 6


def test_another_structure_is_another_variant() -> None:
    g = momentum(SHAPES)
    p = g.tensors("q", SHAPES)
    g.foreach("mul", p, 0.5)
    _, plan = planned(g)
    (kernel,) = kernels(plan)
    assert sorted(len(v.nodes) for v in kernel.variants) == [1, 3]


def test_a_for_loop_is_the_same_kernel_as_foreach() -> None:
    loop = GraphBuilder()
    p, m, grad = (loop.tensors(name, SHAPES) for name in "pmg")
    for a, b, c in zip(p, m, grad, strict=True):
        loop.op("mul_rounded", b, 0.9, out=b)
        loop.op("add", b, c, 1.0, out=b)
        loop.op("add", a, b, -0.1, out=a)
    (one,) = kernels(planned(loop)[1])
    (other,) = kernels(planned(momentum(SHAPES))[1])
    assert same_variant(one, other)
    assert one.variants[0].lanes == other.variants[0].lanes
    assert one.variants[0].nodes == other.variants[0].nodes


def test_variants_do_not_depend_on_the_number_of_lanes() -> None:
    (few,) = kernels(planned(adaptive(SHAPES))[1])
    (many,) = kernels(planned(adaptive([(7,)] * 50))[1])
    assert same_variant(few, many)


def test_values_can_be_swapped_through_a_temp() -> None:
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,), (4,)])
    t = g.op("copy", p, out=g.like(p))
    g.op("copy", q, out=p)
    g.op("copy", t, out=q)
    _, plan = planned(g)
    v = only_variant(plan)
    assert len(v.stores) == 2


def test_lanes_that_share_a_tensor_they_only_read_stay_apart() -> None:
    g = GraphBuilder()
    p = g.tensors("p", [(4,)] * 3)
    shared = g.tensor("g", (4,))
    g.foreach("add", p, shared, 1.0)
    _, plan = planned(g)
    assert only_variant(plan).lanes == 3


# ---------------------------------------------------------------- several stages


def test_overlapping_views_run_one_after_the_other() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (8,))
    a, b, c = (g.view(flat, f"v{k}", (4,), k) for k in (0, 4, 2))
    for x in (a, b, c):
        g.op("mul", x, 2.0, out=x)
    _, plan = planned(g)
    first, second = kernels(plan)
    assert sorted(names(g, first.variants[0].columns[0])) == ["v0", "v4"]
    assert names(g, second.variants[0].columns[0]) == ["v2"]
    assert codes(plan) == {"overlap"}


def test_views_side_by_side_are_lanes_of_one_kernel() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (9,))
    for k in range(3):
        v = g.view(flat, f"v{k}", (3,), 3 * k)
        g.op("mul", v, 2.0, out=v)
    _, plan = planned(g)
    assert only_variant(plan).lanes == 3


@pytest.mark.parametrize("first", ["view", "base"])
def test_a_number_seen_in_a_tensor_that_the_step_writes(first: str) -> None:
    """`s = p[0]` is memory of p: it is not free to be read at any time."""
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,), (3,)])
    s = g.view(p, "p0[0]", ())
    if first == "view":
        g.op("mul", q, g.op("mul", s, 2.0), out=q)
        g.op("add", p, 1.0, out=p)
    else:
        g.op("add", p, 1.0, out=p)
        g.op("mul", q, g.op("mul", s, 2.0), out=q)
    _, plan = planned(g)
    assert len(kernels(plan)) == 2
    assert codes(plan) == {"overlap"}


def test_an_extern_in_the_middle_splits() -> None:
    g = GraphBuilder()
    p = g.tensors("p", [(4,), (5,)])
    g.foreach("mul", p, 0.9)
    g.extern("aten.special", [p[0]], [p[0]], "no rule for this op")
    g.foreach("add", p, 1.0)
    _, plan = planned(g)
    before, extern, after = plan.steps
    assert isinstance(extern, Extern)
    # the lane that the extern does not touch needs no second kernel
    assert sum(v.lanes for v in before.variants) == 2
    assert names(g, after.variants[0].columns[0]) == ["p0"]
    assert codes(plan) == {"extern"}
    (refusal,) = plan.refusals
    assert refusal.detail == "no rule for this op"


def test_an_extern_with_no_inputs_comes_first() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    noise = g.like(p, "noise")
    g.op("mul", p, 0.9, out=p)
    g.extern("aten.rand", [], [noise])
    g.op("add", p, noise, 1.0, out=p)
    _, plan = planned(g)
    assert isinstance(plan.steps[0], Extern)
    assert isinstance(plan.steps[-1], Kernel)


def test_externs_keep_their_order() -> None:
    """A call may have a state that no tensor shows: the generator of random numbers."""
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,), (4,)])
    g.op("mul", p, 0.9, out=p)
    g.extern("aten.bernoulli", [p], [p], ordered=True)
    g.extern("aten.normal", [q], [q], ordered=True)
    _, plan = planned(g)
    assert [s.name for s in plan.steps if isinstance(s, Extern)] == [
        "aten.bernoulli",
        "aten.normal",
    ]


def test_broadcasting_over_a_tensor_the_step_writes() -> None:
    g = GraphBuilder()
    p, row = g.tensors("p", [(3, 4), (4,)])
    g.op("mul", row, 2.0, out=row)
    g.op("add", p, row, out=p)
    _, plan = planned(g)
    assert len(kernels(plan)) == 2
    assert codes(plan) == {"index_space"}


@pytest.mark.parametrize("index", range(3))
def test_legality_is_asked_at_every_list_index(index: int) -> None:
    """At one index of the lists an operand is a row, which its call changes: there the
    two calls do not fuse. A schedule in which they do is refused, and names that lane.
    """
    g = GraphBuilder()
    p = g.tensors("p", [(3, 4)] * 3)
    rows = g.tensors("q", [(4,) if i == index else (3, 4) for i in range(3)])
    g.foreach("mul", rows, 2.0)
    g.foreach("add", p, rows, 1.0)
    graph, plan = planned(g)
    (refusal,) = plan.refusals
    assert refusal[2:5] == ("index_space", "[4] and [3, 4]", index)
    assert refusal.line == "step.py:2"
    fused, others = kernels(plan)
    whole = next(v for v in fused.variants if len(v.nodes) == 2)
    assert (whole.lanes, others.lanes) == (2, 1)
    columns = {
        "p": next(k for k, c in enumerate(whole.columns) if c[0] in p),
        "q": next(k for k, c in enumerate(whole.columns) if c[0] in rows),
    }
    added = {columns["p"]: p[index], columns["q"]: rows[index]}
    forced = replace(
        whole,
        columns=tuple((*c, added[k]) for k, c in enumerate(whole.columns)),
        scalars=tuple((*c, c[0]) for c in whole.scalars),
        shapes=(*whole.shapes, (3, 4)),
    )
    with pytest.raises(GraphError, match=rf"of lane 2 is q{index}, shape \[4\]"):
        check_schedule(graph, Schedule((Kernel("kernel0", (forced,)),)))


def test_broadcasting_over_a_tensor_the_step_only_reads() -> None:
    g = GraphBuilder()
    p, row = g.tensors("p", [(3, 4), (4,)])
    g.op("add", p, row, out=p)
    _, plan = planned(g)
    assert only_variant(plan).shapes == ((3, 4),)


def test_devices_are_apart() -> None:
    g = GraphBuilder()
    for k, device in enumerate(("cpu", "cuda:0", "cuda:1")):
        p = g.tensor(f"p{k}", (4,), device=device)
        g.op("mul", p, 2.0, out=p)
    _, plan = planned(g)
    assert len(kernels(plan)) == 3


# ---------------------------------------------------------------- numbers


def test_a_uniform_number_is_computed_in_every_lane() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    rate = g.tensor("lr", (), kind="arg")
    negative = g.op("neg", rate)
    g.foreach("mul", p, negative)
    _, plan = planned(g)
    v = only_variant(plan)
    assert "neg" in {v.instrs[i].op for i in v.lane_code}
    lane = next(s for s, slot in enumerate(v.slots) if slot.domain == "lane")
    assert names(g, v.columns[lane]) == ["lr"] * 3
    assert plan.temps == ()


def test_a_uniform_number_that_the_step_changes_later_is_read_before() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    rate = g.tensor("lr", ())
    g.foreach("mul", p, g.op("neg", rate))
    g.op("mul", rate, 0.5, out=rate)
    planned(g)


def test_a_step_counter_of_each_lane_joins_its_lane() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    steps = g.tensors("step", [()] * 3)
    g.foreach("add", steps, 1.0)
    g.foreach("mul", p, steps)
    _, plan = planned(g)
    v = only_variant(plan)
    assert [s.domain for s in v.slots] == ["lane", "element"]


def test_a_written_step_counter_of_all_lanes_runs_before_them() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    step = g.tensor("step", ())
    g.op("add", step, 1.0, out=step)
    g.foreach("mul", p, step)
    _, plan = planned(g)
    first, second = kernels(plan)
    assert first.lanes == 1
    assert second.lanes == 3
    assert codes(plan) == {"shared_scalar"}


@pytest.mark.parametrize("shapes", [SHAPES, [(4,)] * 3], ids=["shapes", "one-shape"])
def test_a_step_counter_of_all_lanes_that_is_written_after_them(shapes: Any) -> None:
    """Read by lanes of several shapes, then changed: it is no reason to join them."""
    g = GraphBuilder()
    p = g.tensors("p", shapes)
    step = g.tensor("step", ())
    g.foreach("mul", p, step)
    g.op("add", step, 1.0, out=step)
    _, plan = planned(g)
    first, second = kernels(plan)
    assert first.lanes == 3
    assert second.lanes == 1
    assert codes(plan) == {"shared_scalar"}


def test_a_step_counter_written_before_and_after_its_readers() -> None:
    g = GraphBuilder()
    p = g.tensors("p", SHAPES)
    step = g.tensor("step", ())
    g.op("add", step, 1.0, out=step)
    g.foreach("mul", p, step)
    g.op("add", step, 1.0, out=step)
    _, plan = planned(g)
    assert [k.lanes for k in kernels(plan)] == [1, 3, 1]


def test_numbers_alone_are_a_kernel() -> None:
    g = GraphBuilder()
    steps = g.tensors("step", [()] * 3)
    g.foreach("add", steps, 1.0)
    _, plan = planned(g)
    v = only_variant(plan)
    assert v.code == ()
    assert v.shapes == ((), (), ())


def test_the_tail_of_a_loop_is_not_asked_once_per_lane() -> None:
    """bf16 `p.fill_(2).add_(u, alpha=0.3)`: the same for all elements but for tails."""
    g = GraphBuilder()
    p = g.tensor("p", (40,), "bf16")
    u = g.tensor("u", (), "bf16")
    g.op("fill", 2.0, out=p)
    g.op("add", p, u, 0.3, out=p)
    _, plan = planned(g)
    assert "tail" in set(opcodes(plan))


# ---------------------------------------------------------------- dependencies, cost


def test_overlaps_of_slices() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (8,))
    a, b = g.view(flat, "a", (4,), 0), g.view(flat, "b", (4,), 4)
    empty = g.view(flat, "empty", (0,), 2)
    found = overlaps(g.graph().buffers)
    assert sorted(found[flat]) == [a, b]
    assert found[a] == found[b] == [flat]
    assert empty not in found


def _lines_run(graph: Any) -> int:
    """Lines of Python that the scheduler runs for a graph: a cost without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        schedule(graph)
    finally:
        sys.settrace(before)
    return count


def _loop(lanes: int) -> GraphBuilder:
    """Lane after lane; values and lanes interleave as in a for-loop over parameters."""
    g = GraphBuilder()
    for k in range(lanes):
        p, grad, step = (
            g.tensor(f"{name}{k}", shape)
            for name, shape in (("p", (4,)), ("g", (4,)), ("step", ()))
        )
        g.op("add", step, 1.0, out=step)
        g.op("mul", p, step, out=p)
        g.op("add", p, grad, -0.1, out=p)
    return g


@pytest.mark.parametrize(
    "build", [_loop, lambda n: momentum([(4,)] * n)], ids=["loop", "foreach"]
)
def test_cost_is_linear_in_lanes(build: Any) -> None:
    few, many = (_lines_run(build(n).graph(check=False)) for n in (50, 200))
    assert many < 4.2 * few


def test_four_thousand_lanes() -> None:
    graph = replace(momentum([(4,)] * 4000).graph())
    assert only_variant(schedule(graph)).lanes == 4000


# ---------------------------------------------------------------- text


def test_show_is_readable_and_short(golden: Any) -> None:
    g = adaptive(SHAPES)
    p = g.tensor("q", (3, 4))
    g.extern("aten.special", [p], [p], "no rule for this op")
    g.op("mul", p, Symbol(0), out=p)
    graph, plan = planned(g)
    golden("graph.txt", show_graph(graph))
    golden("schedule.txt", show_schedule(graph, plan))


def test_show_does_not_grow_with_lanes() -> None:
    few, many = (planned(momentum([(4,)] * n)) for n in (10, 500))
    for text in (lambda g, _: show_graph(g), show_schedule):
        assert len(text(*few).splitlines()) == len(text(*many).splitlines())


# ---------------------------------------------------------------- random graphs


def random_graph(seed: int) -> GraphBuilder:
    """A few pointwise calls, externs and temps over tensors, numbers and views."""
    r = random.Random(seed)
    has = {
        k: r.random() < 0.4
        for k in ("views", "numbers", "extern", "number_views", "bf16", "temps")
    }
    g = GraphBuilder()
    tensors = [
        g.tensor(
            f"p{i}",
            r.choice([(4,), (3,)]),
            "bf16" if has["bf16"] and r.random() < 0.5 else "f32",
        )
        for i in range(r.randint(2, 4))
    ]
    numbers = [g.tensor(f"s{i}", ()) for i in range(r.randint(0, 2))]
    if has["views"]:
        base = g.tensor("base", (8,))
        tensors.append(base)
        for i, offset in enumerate(r.sample([0, 2, 4], r.randint(1, 3))):
            tensors.append(g.view(base, f"v{i}", (4,), offset))
        if has["number_views"]:
            numbers.append(g.view(base, "z", (), r.choice([0, 5])))
    for _ in range(r.randint(2, 9)):
        out = r.choice(tensors + numbers if has["numbers"] else tensors)
        if out in numbers:
            if r.random() < 0.5:
                numbers.append(g.op("mul", out, 2.0))
            else:
                # torch refuses partial overlap within one call
                own = [n for n in numbers if n == out or _apart(g, n, out)]
                g.op("add", out, r.choice(own), 1.0, out=out)
            continue
        if has["extern"] and r.random() < 0.25:
            g.extern("aten.special", [r.choice(tensors + numbers), out], [out])
            continue
        dtype, shape = g.buffers[out].dtype, g.buffers[out].shape
        x = r.choice(
            [
                t
                for t in tensors + numbers
                if g.buffers[t].dtype == dtype
                and g.buffers[t].shape in (shape, ())
                and (t == out or _apart(g, t, out))
            ]
        )
        if has["temps"] and r.random() < 0.4:
            tensors.append(g.op("mul", out, x))
        elif r.random() < 0.15:
            g.op("fill", 3.0, out=out)
        else:
            g.op("add", out, x, 0.5, out=out)
    if r.random() < 0.3:
        written = [b for b in range(len(g.buffers)) if g.current[b] >= 0]
        g.outputs.append(r.choice(written))
    return g


def _apart(g: GraphBuilder, a: int, b: int) -> bool:
    return g.buffers[a].storage != g.buffers[b].storage


@pytest.mark.slow
@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_every_schedule_leaves_what_its_graph_leaves(seed: int) -> None:
    graph, _ = planned(random_graph(seed))

    def passed(_: str, made: Schedule | None) -> None:
        if made is not None:
            check_schedule(graph, made)

    schedule(graph, passed, Machine(40))
