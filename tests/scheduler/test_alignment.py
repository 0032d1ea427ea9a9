"""Rows that are alike are planned once: what planning costs follows distinct bodies.

Graphs by hand, no torch. `planned` proves every schedule to do what its graph does.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuseopt.ir.graph import Extern, Schedule
from fuseopt.ir.printer import show_schedule
from fuseopt.ir.verifier import check_graph, check_schedule
from fuseopt.scheduler import fusion, grouping, kernels, schedule, stages
from tests.build_graphs import GraphBuilder, adaptive, momentum, planned
from tests.ir.test_columns import each_alone, loop

FEW, MANY = 3, 300
SHAPES = [(3, 4), (5,), (2, 2, 2), ()]


def shapes(n: int) -> list[tuple[int, ...]]:
    return [SHAPES[i % len(SHAPES)] for i in range(n)]


def clipped(n: int) -> GraphBuilder:
    """All gradients over the norm of all of them, then a step of each parameter."""
    g = GraphBuilder()
    grads = g.tensors("grad", [(4 + i % 3,) for i in range(n)])
    stack = g.tensor("stack", (n,), kind="temp")
    call = g._next_call()
    norms = []
    for x in grads:
        g._calls = call - 1
        norms.append(g.reduce("norm2", x))
    pieces = [
        g.tensor(f"norm{i}", (), kind="temp", offset=i, storage=stack) for i in range(n)
    ]
    call = g._next_call()
    for norm, piece in zip(norms, pieces, strict=True):
        g.op("copy", norm, out=piece, call=call)
    total = g.reduce("norm2", stack)
    g.foreach("mul", grads, g.op("reciprocal", total))
    p = g.tensors("p", [(4 + i % 3,) for i in range(n)])
    g.foreach("add", p, grads, -0.1)
    return g


def rates(n: int) -> GraphBuilder:
    """A rate that all read, and that the step changes when they have."""
    g = momentum(shapes(n))
    rate = g.tensor("rate", ())
    p = [b for b, x in enumerate(g.buffers) if x.name.startswith("p")]
    g.foreach("mul", p, rate)
    g.op("mul", rate, 0.5, out=rate)
    return g


def some(n: int) -> GraphBuilder:
    """Only every second parameter decays, and the lists are in another order."""
    g = GraphBuilder()
    p, grad = g.tensors("p", shapes(n)), g.tensors("g", shapes(n))
    decayed = list(range(0, n, 2))
    g.foreach("mul", [p[i] for i in decayed], 0.9)
    order = sorted(range(n), key=lambda i: (i * 7) % n)
    g.foreach("add", [p[i] for i in order], [grad[i] for i in order], 1.0)
    return g


def rows_and_columns(n: int) -> GraphBuilder:
    """A loop that means over rows, with counters on the host for a device's tensors."""
    g = GraphBuilder()
    for i in range(n):
        p = g.tensor(f"p{i}", (3, 4), device="sim:0")
        mean = g.tensor(f"m{i}", (3,), device="sim:0")
        count = g.tensor(f"count{i}", ())
        g.op("add", count, 1.0, out=count)
        g.op("add", mean, g.op("mul", g.reduce("sum", p, (1,)), 0.25), out=mean)
        g.op("mul", p, count, out=p)
    return g


def looped(n: int) -> GraphBuilder:
    g = GraphBuilder()
    loop(g, n)
    return g


GRAPHS: dict[str, Callable[[int], GraphBuilder]] = {
    "momentum": lambda n: momentum(shapes(n)),
    "adaptive": lambda n: adaptive(shapes(n)),
    "loop": looped,
    "clipped": clipped,
    "rates": rates,
    "some": some,
    "rows and columns": rows_and_columns,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often the scheduler asks, places, describes and fuses."""
    found: dict[str, int] = {}

    def count(owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] = found.get(name, 0) + 1
            return inner(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(stages, "why_not")
    count(stages._Stager, "place")
    count(stages, "space")
    count(kernels, "describe_lanes")
    count(kernels, "fuse")
    count(fusion, "merged")
    count(grouping, "_is_number")
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_planning_costs_what_the_distinct_bodies_cost(
    name: str, calls: dict[str, int]
) -> None:
    seen = []
    for lanes in (12, MANY):
        graph = GRAPHS[name](lanes).graph(check=False)
        calls.clear()
        plan = schedule(graph)
        assert sum(k.lanes for k in plan.kernels) >= lanes
        seen.append((len(graph.nodes), dict(calls), len(plan.refusals)))
    assert seen[0] == seen[1]
    assert all(seen[0][1].values())


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("lanes", [1, 2, FEW, 7])
def test_columns_lose_nothing(name: str, lanes: int) -> None:
    """The kernels are those that come of a node for each position."""
    g = GRAPHS[name](lanes)
    assert kernels_of(planned(g)[1]) == kernels_of(schedule(each_alone(g)))


def kernels_of(plan: Schedule) -> list[Any]:
    """What a schedule runs, whatever the order of lanes in a table."""
    steps: list[Any] = []
    for step in plan.steps:
        if isinstance(step, Extern):
            steps.append(step)
            continue
        assert not hasattr(step, "blocks")
        steps.append(
            [
                (
                    v.instrs,
                    v.lane_code,
                    v.stores,
                    v.slots,
                    v.reduction,
                    sorted(zip(v.shapes, *v.columns, strict=True)),
                    sorted(zip(v.columns[0], *v.scalars, strict=True), key=repr),
                )
                for v in (*step.variants, *step.finish)
            ]
        )
    return steps


def lanes_of(plan: Schedule) -> list[Any]:
    """What the lanes of each kernel run and touch, whatever the order of positions of
    one call: those of other dtypes are other nodes.
    """
    return [
        step
        if isinstance(step, Extern)
        else sorted(
            (sorted(v.nodes), sorted(i.op for i in v.instrs), sorted(own))
            for v in (*step.variants, *step.finish)
            for own in zip(*v.columns, strict=True)
        )
        for step in plan.steps
    ]


@pytest.mark.parametrize("index", [0, 1, 4])
def test_one_row_that_differs_is_a_class_of_its_own(
    index: int, calls: dict[str, int]
) -> None:
    """Its refusal has its index, and the other rows are asked once."""
    asked = []
    for lanes in (5, 50):
        g = GraphBuilder()
        p = g.tensors("p", [(3, 4)] * lanes)
        rows = g.tensors("q", [(4,) if i == index else (3, 4) for i in range(lanes)])
        g.foreach("mul", rows, 2.0)
        g.foreach("add", p, rows, 1.0)
        calls.clear()
        graph, plan = planned(g)
        (refusal,) = plan.refusals
        assert (refusal.code, refusal.list_index) == ("index_space", index)
        assert f"at list index {index}" in show_schedule(graph, plan)
        asked.append(calls["why_not"])
    assert asked == [2, 2]


def test_a_refusal_between_calls_without_lists_has_no_index() -> None:
    g = GraphBuilder()
    p, row = g.tensors("p", [(3, 4), (4,)])
    g.op("mul", row, 2.0, out=row)
    g.op("add", p, row, out=p)
    graph, plan = planned(g)
    (refusal,) = plan.refusals
    assert refusal.list_index == -1
    assert "list index" not in show_schedule(graph, plan)


def test_an_extern_at_one_index() -> None:
    g = GraphBuilder()
    p = g.tensors("p", [(4,)] * 5)
    g.foreach("mul", p, 0.9)
    g.extern("aten.special", [p[3]], [p[3]], "no rule for this op")
    g.foreach("add", p, 1.0)
    _, plan = planned(g)
    (refusal,) = plan.refusals
    assert (refusal.code, refusal.list_index) == ("extern", 3)
    before, _, after = plan.steps
    assert (before.lanes, after.lanes) == (5, 1)  # type: ignore[union-attr]


def test_a_tensor_of_the_step_that_all_lanes_read_makes_them_one() -> None:
    """No number: it has elements, so that who makes it and who reads it may fuse."""
    g = GraphBuilder()
    p, q = g.tensors("p", [(4,)] * 3), g.tensor("q", (4,))
    g.foreach("add", p, g.op("mul", q, 2.0), 1.0)
    _, plan = planned(g)
    (kernel,) = plan.kernels
    assert kernel.lanes == 1


def test_numbers_of_all_lanes_that_a_shared_number_changes() -> None:
    """They are one lane with it, in the stage before the tensors."""
    g = GraphBuilder()
    p, steps = g.tensors("p", [(4,)] * 3), g.tensors("step", [()] * 3)
    rate = g.tensor("rate", ())
    g.op("add", rate, 1.0, out=rate)
    g.foreach("add", steps, rate, 1.0)
    g.foreach("mul", p, steps)
    _, plan = planned(g)
    assert [k.lanes for k in plan.kernels] == [1, 3]
    assert kernels_of(plan) == kernels_of(schedule(each_alone(g)))


def random_lists(seed: int) -> GraphBuilder:
    """Calls of lists that differ in length and order, share tensors, numbers and
    memory, and reduce over other dimensions.
    """
    r = random.Random(seed)
    g = GraphBuilder()
    n = r.randint(1, 5)
    own = [r.choice([(2, 3), (2, 3), (4,), ()]) for _ in range(n)]
    if r.random() < 0.5:
        own = [own[0]] * n
    device = [r.choice(["cpu", "sim:0"]) if r.random() < 0.3 else "cpu"] * n
    p = [g.tensor(f"p{i}", s, device=device[i]) for i, s in enumerate(own)]
    m = [g.tensor(f"m{i}", s, device=device[i]) for i, s in enumerate(own)]
    if r.random() < 0.3:
        flat = g.tensor("flat", (24,), device=device[0])
        step = r.choice([4, 4, 3])
        p = [g.view(flat, f"v{i}", (4,), step * i) for i in range(n)]
        m = [g.tensor(f"w{i}", (4,), device=device[0]) for i in range(n)]
    steps = g.tensors("step", [()] * n)
    numbers = [g.tensor("a", ()), g.tensor("b", ())]
    for _ in range(r.randint(1, 7)):
        order = list(range(n))
        if r.random() < 0.3:
            r.shuffle(order)
        if r.random() < 0.3:
            order = order[: r.randint(1, n)]
        if r.random() < 0.1:
            order.append(r.choice(order))
        one, two = r.choice([(p, m), (m, p), (p, p), (m, m)])
        x, y = [one[i] for i in order], [two[i] for i in order]
        kind = r.choice("number steps count pair pair rate temp reduce extern".split())
        if kind == "number":
            g.foreach("mul", x, r.choice([0.5, 0.9]))
        elif kind == "steps":
            g.foreach("mul", x, [steps[i] for i in order])
        elif kind == "count":
            g.foreach("add", [steps[i] for i in order], r.choice([1.0, 2.0]))
        elif kind == "pair":
            g.foreach("add", x, y, 0.5)
        elif kind == "rate":
            number = r.choice(numbers)
            if r.random() < 0.5:
                g.op("add", number, 1.0, out=number)
            g.foreach("mul", x, number)
            if r.random() < 0.3:
                g.op("mul", number, r.choice(steps), out=number)
        elif kind == "temp":
            g.foreach("add", x, g.foreach("mul", y, 0.5, inplace=False), 1.0)
        elif kind == "extern":
            changed = r.choice(x)
            g.extern("aten.special", [r.choice(y), changed], [changed])
        else:
            call = g._next_call()
            found = []
            full = any(len(g.buffers[b].shape) < 2 for b in x) or r.random() < 0.7
            for b in x:
                g._calls = call - 1
                found.append(g.reduce("sum", b, None if full else (r.randint(0, 1),)))
            if all(g.buffers[b].shape == () for b in found):
                g.foreach("mul", x, found)
            else:
                g.outputs += found
    return g


@pytest.mark.slow
@settings(max_examples=400, deadline=None, database=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_lists_do_what_their_positions_do(seed: int) -> None:
    """Proven for the kernels, and they are those of a node for each position."""
    g = random_lists(seed)
    graph, alone = g.graph(), each_alone(g)
    check_graph(alone)
    plan = schedule(graph)
    check_schedule(alone, plan)
    assert lanes_of(plan) == lanes_of(schedule(alone))
