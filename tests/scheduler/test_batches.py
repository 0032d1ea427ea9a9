"""Products of matrices that are alike and ready together become one call. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseopt.errors import GraphError
from fuseopt.ir.graph import Batch, Extern, Graph, Schedule, Stack
from fuseopt.ir.printer import show_schedule
from fuseopt.ir.products import (
    ADDRESSED,
    CHAINED,
    COPIED,
    DENSE,
    PADDED,
    SHARED,
    Product,
    Trial,
)
from fuseopt.ir.verifier import check_schedule
from fuseopt.scheduler import Machine, schedule
from fuseopt.scheduler.passes import Verdict
from tests.build_graphs import GraphBuilder


class Products(GraphBuilder):
    """A graph with products, and a Batching that allows all of them one way."""

    def __init__(self, way: str = DENSE) -> None:
        super().__init__()
        self.way = way
        self.bytes = 1 << 26
        self.places = self.chains = False
        self.products: dict[int, Product | str] = {}
        self.trials: list[Trial] = []

    def matrix(
        self, shape: tuple[int, ...], dtype: str = "f32", device: str = "cpu"
    ) -> int:
        return self.tensor(f"t{len(self.buffers)}", shape, dtype, "temp", device)

    def transposed(self, x: int) -> int:
        b = self.buffers[x]
        return self.tensor(
            f"{b.name}T", b.shape[::-1], b.dtype, b.kind, b.device, b.stride[::-1],
            storage=b.storage,
        )  # fmt: skip

    def times(self, op: str, *operands: int, scales: tuple[float, ...] = ()) -> int:
        """The product of the last two operands."""
        left, right = (self.buffers[b] for b in operands[-2:])
        shape = (*left.shape[:-1], right.shape[-1])
        result = self.matrix(shape, left.dtype, left.device)
        self.products[self._externs] = Product(op, operands, (result,), scales)
        self.extern(op, operands, [result])
        return result

    def product(self, payload: int) -> Product | str:
        return self.products.get(payload, "")

    def verdict(self, trial: Trial, chain: bool) -> Verdict:
        self.trials.append(trial)
        return Verdict(self.way, "" if self.way else "other bits")

    def planned(self) -> tuple[Graph, Schedule]:
        graph = self.graph()
        plan = schedule(graph, machine=Machine(1, self))
        check_schedule(graph, plan)
        return graph, plan


def newton_schulz(g: Products, p: int, iterations: int = 2, dtype: str = "f32") -> None:
    """Two products an iteration of what a kernel makes of p, which gets the result."""
    x = g.op("mul", p, 0.5)
    for _ in range(iterations):
        gram = g.times("mm", x, g.transposed(x))
        x = g.times("addmm", x, gram, x, scales=(3.0, -1.0))
    g.op("add", p, x, out=p)


def of_lanes(
    *shapes: tuple[int, int], way: str = DENSE, dtype: str = "f32"
) -> Products:
    g = Products(way)
    for i, shape in enumerate(shapes):
        newton_schulz(g, g.tensor(f"p{i}", shape, dtype))
    return g


def reasons(plan: Schedule) -> dict[str, int]:
    return {x.reason: x.calls for x in plan.alone}


def test_a_chain_of_lanes_is_one_call_a_product() -> None:
    _, plan = of_lanes((4, 6), (4, 6), (8, 8), (4, 6), (8, 8)).planned()
    names = ["mm x 3", "addmm x 3", "mm x 2", "addmm x 2"]
    assert sorted(b.name for b in plan.batches) == sorted(names * 2)
    assert not any(isinstance(s, Extern) for s in plan.steps)
    assert len(plan.externs) == 20
    assert plan.alone == ()


def test_nothing_is_copied_within_a_chain() -> None:
    """What the kernel makes is a stack, and so is all that follows."""
    _, plan = of_lanes(*[(4, 6)] * 3).planned()
    operands = [x.stack for b in plan.batches for x in b.operands]
    assert min(operands) >= 0
    first, second, *_ = plan.batches
    assert first.operands[0].shape == (3, 4, 6)
    assert first.operands[1].shape == (3, 6, 4)
    assert first.operands[1].stride == (24, 1, 6)
    assert second.operands[1].stack == first.results[0].stack
    # the kernel that makes them is told nothing: its temps lie elsewhere
    assert plan.stacks[0].step == 4 * 6 * 4


def test_rows_lie_in_the_order_of_the_first_batch() -> None:
    g = Products()
    ps = g.tensors("p", [(4, 4)] * 3)
    xs = g.foreach("mul", ps, 0.5, inplace=False)
    ys = [g.times("mm", x, x) for x in xs]
    zs = {i: g.times("mm", ys[i], ys[i]) for i in (2, 0, 1)}
    g.foreach("add", ps, [zs[i] for i in range(3)])
    _, plan = g.planned()
    one, two = plan.batches
    assert two.operands[0].stack == one.results[0].stack
    assert two.operands[0].buffers == one.results[0].buffers == tuple(ys)


def test_gaps_between_the_rows_of_a_result() -> None:
    _, plan = of_lanes(*[(4, 4)] * 3, way=PADDED).planned()
    first = plan.batches[0]
    assert plan.stacks[first.results[0].stack].step == 192
    assert first.results[0].stride == (48, 4, 1)
    assert plan.batches[1].operands[1].stride == (48, 4, 1)


def test_other_bits_are_other_calls() -> None:
    g = of_lanes(*[(4, 4)] * 3, way="")
    _, plan = g.planned()
    assert plan.batches == ()
    assert reasons(plan) == {"other bits": 6}
    assert len(g.trials) == 4
    assert g.trials[0].rows == 3
    assert g.trials[0].layouts == (((4, 4), (4, 1), 0), ((4, 4), (1, 4), 0))
    assert g.trials[1].scales == ("any", "-1")


def test_single_calls_keep_the_order_of_their_lane() -> None:
    _, plan = of_lanes((4, 4), (4, 4), way="").planned()
    names = [s.name for s in plan.steps if isinstance(s, Extern)]
    assert names == ["mm", "addmm", "mm", "addmm"] * 2


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((0, 4), "f32", "an empty product"),
        ((256, 256), "f32", "33,554,432 flops take longer than a call"),
        ((4, 4), "i64", "no batches of i64"),
    ],
)
def test_what_no_batch_is_made_of(
    shape: tuple[int, int], dtype: str, reason: str
) -> None:
    g = Products()
    for i in range(3):
        x, y = (g.tensor(f"{n}{i}", shape, dtype) for n in "xy")
        g.op(
            "copy",
            g.times("mm", x, g.transposed(y)),
            out=g.tensor(f"z{i}", (shape[0],) * 2, dtype),
        )
    _, plan = g.planned()
    assert plan.batches == ()
    assert reasons(plan) == {reason: 3}


def test_one_of_a_kind_stays_alone() -> None:
    _, plan = of_lanes((4, 4), (8, 8)).planned()
    assert reasons(plan) == {"no other product of its kind is ready with it": 2}
    assert sum(x.calls for x in plan.alone) == 8


def on_devices(way: str, *devices: str) -> Products:
    """On each device two squares of three matrices, made and read by kernels."""
    g = Products(way)
    for place in devices:
        for i in range(3):
            x = g.tensor(f"x{place}{i}", (4, 4), device=place)
            y = g.op("mul", x, 2.0, out=g.matrix((4, 4), device=place))
            for _ in range(2):
                y = g.times("mm", y, y)
            g.op("add", x, y, out=x)
    return g


def test_each_device_has_stacks_of_its_own() -> None:
    _, plan = on_devices(DENSE, "cuda:0", "cuda:1", "cpu").planned()
    assert [b.name for b in plan.batches] == ["mm x 3"] * 6
    assert plan.alone == ()
    first, second = plan.memory.remote["cuda:0"], plan.memory.remote["cuda:1"]
    assert first[0] == 0
    assert first[1] == second[0]
    assert second[1] < plan.memory.size
    # two devices at least: no graph has their calls
    assert plan.branches == {}


def test_what_has_no_batch_on_a_device_is_branches() -> None:
    graph, plan = on_devices("", "cuda:0").planned()
    ((start, branches),) = plan.branches.items()
    assert [len(x) for x in branches] == [2, 2, 2]
    assert sorted(i for x in branches for i in x) == [*range(start, start + 6)]
    for wrong in (
        (branches[0], (*branches[1], branches[2][1]), branches[2][:1]),
        (branches[0], (*branches[1], *branches[2], start)),
        (branches[0][::-1], *branches[1:]),
    ):
        with pytest.raises(GraphError, match="branches"):
            check_schedule(graph, replace(plan, branches={start: wrong}))
    _, plan = on_devices("", "cpu").planned()
    assert plan.branches == {}


def test_batches_whose_stacks_share_a_place_are_one_branch() -> None:
    """Chains of two shapes: stacks of one lie where some of the other lay."""
    g = Products()
    for n in (4, 4, 8, 8):
        x = g.tensor(f"x{len(g.buffers)}", (n, n), device="cuda:0")
        y = g.op("mul", x, 2.0, out=g.matrix((n, n), device="cuda:0"))
        for _ in range(4):
            y = g.times("mm", y, y)
        g.op("add", x, y, out=x)
    graph, plan = g.planned()
    assert len(plan.batches) == 8
    assert plan.branches == {}
    start = plan.steps.index(plan.batches[0])
    by_shape: dict[object, list[int]] = {}
    for i, b in enumerate(plan.steps):
        if isinstance(b, Batch):
            by_shape.setdefault(b.trial.results, []).append(i)
    apart = tuple(map(tuple, by_shape.values()))
    with pytest.raises(GraphError, match="two branches share a place in the arena"):
        check_schedule(graph, replace(plan, branches={start: apart}))


def test_what_others_said_of_a_call_is_told() -> None:
    g = of_lanes((4, 4), (4, 4))
    g.products = dict.fromkeys(g.products, "autocast is on")
    _, plan = g.planned()
    assert reasons(plan) == {"autocast is on": 4}


def test_matrices_of_the_caller_are_copied_if_they_are_small() -> None:
    def of(n: int) -> Schedule:
        g = Products()
        for i in range(2):
            x, y = (g.tensor(f"{name}{i}", (n, n)) for name in "xy")
            g.op("add", x, g.times("mm", x, y), out=x)
        return g.planned()[1]

    (batch,) = of(8).batches
    assert [x.stack for x in batch.operands] == [COPIED, COPIED]
    assert "not adjacent" in next(iter(reasons(of(96))))


@pytest.mark.parametrize("rows", [1, 2])
def test_generated_code_reads_matrices_where_the_caller_has_them(rows: int) -> None:
    def of(way: str) -> tuple[Graph, Schedule]:
        g = Products(way)
        g.chains = True
        for i in range(rows):
            x, y = (g.tensor(f"{name}{i}", (96, 96)) for name in "xy")
            g.op("add", x, g.times("mm", x, y), out=x)
        return g.planned()

    graph, plan = of(CHAINED)
    (batch,) = plan.batches
    assert [x.stack for x in batch.operands] == [ADDRESSED, ADDRESSED]
    assert batch.results[0].stack >= 0
    assert "addressed [" in show_schedule(graph, plan)
    # without its bits they are too large to copy
    assert of(DENSE)[1].batches == ()


def test_generated_code_finds_rows_in_another_order() -> None:
    g = Products(CHAINED)
    g.chains = True
    ps = g.tensors("p", [(8, 8)] * 3)
    xs = [g.times("mm", p, p) for p in ps]
    # a result of a call lies where ATen puts it
    y = g.matrix((8, 8))
    g.extern("other", (ps[0],), [y])
    made = [g.times("mm", xs[2], y), g.times("mm", xs[0], y)]
    g.foreach("add", ps[:2], made)
    graph, plan = g.planned()
    assert [len(b.externs) for b in plan.batches] == [3, 2]
    assert [x.stack for x in plan.batches[1].operands] == [ADDRESSED, ADDRESSED]
    assert graph.buffers[y].storage not in plan.memory.loose


def test_a_matrix_that_all_rows_share_is_not_copied() -> None:
    g = Products()
    q = g.tensor("q", (4, 4))
    ps = g.tensors("p", [(4, 4)] * 3)
    xs = g.foreach("mul", ps, 0.5, inplace=False)
    g.foreach("add", ps, [g.times("mm", x, q) for x in xs])
    (batch,) = g.planned()[1].batches
    assert batch.operands[1].stack == SHARED
    assert batch.operands[1].stride == (0, 4, 1)


def returned(n: int, device: str = "cpu") -> Products:
    """Products of two matrices of n x n, which the step returns."""
    g = Products()
    for i in range(2):
        x = g.op("mul", g.tensor(f"x{i}", (n, n), device=device), 2.0)
        g.outputs.append(g.times("mm", x, x))
    return g


def test_what_the_step_returns_is_copied_apart() -> None:
    graph, plan = returned(4).planned()
    (batch,) = plan.batches
    (result,) = batch.results
    assert result.stack == COPIED
    assert result.buffers == tuple(graph.outputs)
    # none of them lies in the arena, where a later call would write it
    storages = {graph.buffers[b].storage for b in graph.outputs}
    assert storages.isdisjoint(plan.memory.offsets)
    assert storages <= plan.memory.returned


def test_large_results_that_the_step_returns_stay_alone() -> None:
    for g in (returned(96), returned(4, "cuda:0")):
        _, plan = g.planned()
        assert plan.batches == ()
        assert reasons(plan) == {"the step returns it, or it has other views": 2}


def test_calls_with_several_results() -> None:
    """Each result has a stack of its dtype; constant arguments tell calls apart."""
    g = Products()
    ps = g.tensors("p", [(4, 4)] * 5)
    xs = g.foreach("mul", ps, 0.5, inplace=False)
    for i, x in enumerate(xs):
        vectors, order = g.matrix((4, 4)), g.matrix((4,), "i32")
        options = (("upper", i < 3),)
        g.products[g._externs] = Product("lu", (x,), (vectors, order), (), options)
        g.extern("lu", [x], [vectors, order])
        g.extern("check", [order], [])
        g.op("add", ps[i], vectors, out=ps[i])
    graph, plan = g.planned()
    first, second = plan.batches
    assert [len(b.externs) for b in plan.batches] == [3, 2]
    assert first.flops == 0
    assert [plan.stacks[x.stack].dtype for x in first.results] == ["f32", "i32"]
    assert first.results[1].shape == (3, 4)
    assert first.trial.options == (("upper", True),)
    assert first.trial.results[1].dtype == "i32"
    text = show_schedule(graph, plan)
    assert "batch lu x 3, dense  # step.py:" in text
    with pytest.raises(GraphError, match="its results differ from the writes"):
        check_schedule(graph, changed(plan, 0, results=first.results[::-1]))
    with pytest.raises(GraphError, match="its results differ from the writes"):
        check_schedule(graph, changed(plan, 1, results=second.results[:1]))


@pytest.mark.parametrize(
    ("shape", "dtype", "device", "reason"),
    [
        ((8, 8), "f32", "cuda:0", "decompositions are batched on a CPU only"),
        ((0, 8), "f32", "cpu", "an empty matrix"),
        ((2, 4, 4), "f32", "cpu", "it is a batch already"),
        ((8, 8), "i32", "cpu", "no batches of i32"),
        ((65, 64), "f32", "cpu", "it takes longer than a call"),
    ],
)
def test_what_no_batch_decomposes(
    shape: tuple[int, ...], dtype: str, device: str, reason: str
) -> None:
    g = Products()
    for i in range(2):
        x = g.tensor(f"x{i}", shape, dtype, device=device)
        y = g.matrix(shape, dtype, device)
        g.products[g._externs] = Product("qr", (x,), (y,))
        g.extern("qr", [x], [y])
        g.op("copy", y, out=g.tensor(f"z{i}", shape, dtype, device=device))
    _, plan = g.planned()
    assert plan.batches == ()
    assert reasons(plan) == {reason: 2}


def test_results_of_single_products_have_places_of_their_own() -> None:
    def of(n: int, places: bool) -> Schedule:
        g = of_lanes((n, n), (n, n), way="")
        g.places = places
        return g.planned()[1]

    assert of(8, False).stacks == ()
    plan = of(8, True)
    # four results of each lane, and what a kernel makes for the first
    assert [len(x.storages) for x in plan.stacks] == [1] * 10
    assert plan.memory.returned == frozenset()
    # two of a lane are needed at one time: a matrix and its gram
    assert plan.memory.size <= 4 * 8 * 8 * 4
    assert of(136, True).stacks == ()


def test_what_other_calls_touch_has_no_place() -> None:
    """A call may keep, resize or return what it reads."""
    g = Products("")
    g.places = True
    ps = g.tensors("p", [(8, 8)] * 2)
    xs = g.foreach("mul", ps, 0.5, inplace=False)
    made = [g.times("mm", x, x) for x in xs]
    y = g.matrix((8, 8))
    g.extern("other", (xs[1],), [y])
    g.foreach("add", ps, [made[0], y])
    g.foreach("add", ps, made)
    graph, plan = g.planned()
    placed = {s for x in plan.stacks for s in x.storages}
    assert graph.buffers[xs[0]].storage in placed
    assert graph.buffers[xs[1]].storage not in placed
    assert graph.buffers[y].storage not in placed


def test_a_product_waits_for_what_a_call_between_them_writes() -> None:
    """The second product reads what a call after the first one changes."""
    g = Products()
    ps = g.tensors("p", [(4, 4)] * 2)
    xs = g.foreach("mul", ps, 0.5, inplace=False)
    one = g.times("mm", xs[0], xs[0])
    g.extern("trouble", [xs[1]], [xs[1]])
    two = g.times("mm", xs[1], xs[1])
    g.foreach("add", ps, [one, two])
    _, plan = g.planned()
    assert plan.batches == ()
    assert reasons(plan) == {"no other product of its kind is ready with it": 2}


def test_single_calls_see_no_row_that_begins_anywhere() -> None:
    """A row of 4 x 6 floats begins at no multiple of 64 bytes; one of 4 x 16 does."""

    def of(n: int) -> Schedule:
        g = Products()
        ps = g.tensors("p", [(4, n)] * 2)
        xs = g.foreach("mul", ps, 0.5, inplace=False)
        ys = [g.times("mm", x, g.transposed(x)) for x in xs]
        other = g.matrix((4, n))
        g.extern("look", [xs[0]], [other])
        g.op("add", ps[0], other, out=ps[0])
        for i, y in enumerate(ys):
            g.op("copy", y, out=g.tensor(f"q{i}", (4, 4)))
        return g.planned()[1]

    (batch,) = of(16).batches
    assert batch.operands[0].stack >= 0
    (batch,) = of(6).batches
    assert batch.operands[0].stack == COPIED


def test_large_operands_are_several_batches() -> None:
    lanes = of_lanes(*[(4, 4)] * 5)
    lanes.bytes = 4 * 4 * 4 * 2
    _, plan = lanes.planned()
    assert sorted(len(b.externs) for b in plan.batches) == [2] * 8
    assert sum(x.calls for x in plan.alone) == 4
    lanes = of_lanes(*[(4, 4)] * 5)
    lanes.bytes -= lanes.bytes
    _, plan = lanes.planned()
    assert reasons(plan) == {"two of its matrices have more than batch_bytes": 10}


def test_products_of_batches_have_their_batches_merged() -> None:
    g = Products()
    ps = g.tensors("p", [(3, 4, 4)] * 2)
    xs = g.foreach("mul", ps, 0.5, inplace=False)
    g.foreach("add", ps, [g.times("bmm", x, x) for x in xs])
    (batch,) = g.planned()[1].batches
    assert batch.operands[0].shape == (6, 4, 4)
    assert batch.flops == 2 * 6 * 4**3


def test_the_text_of_a_batch() -> None:
    graph, plan = of_lanes(*[(4, 6)] * 4).planned()
    text = show_schedule(graph, plan)
    assert "batch mm x 4, dense: 768 flops  # step.py:0" in text
    assert "  stack 0 [4, 6, 4]: t1T, " in text


# ---------------------------------------------------------------- what is refused


def changed(plan: Schedule, number: int, **what: object) -> Schedule:
    """A schedule with one of its batches changed."""
    steps = list(plan.steps)
    at = [i for i, s in enumerate(steps) if isinstance(s, Batch)][number]
    batch = steps[at]
    assert isinstance(batch, Batch)
    steps[at] = replace(batch, **what)  # type: ignore[arg-type]
    return replace(plan, steps=tuple(steps))


def test_a_batch_whose_rows_depend_on_each_other_is_refused() -> None:
    graph, plan = of_lanes((4, 4), (4, 4)).planned()
    first, second = plan.batches[0], plan.batches[1]
    both = (first.externs[0], second.externs[0])
    with pytest.raises(GraphError, match="row 1 reads what row 0 writes"):
        check_schedule(graph, changed(plan, 0, externs=both))


def test_rows_that_lie_elsewhere_are_refused() -> None:
    graph, plan = of_lanes((4, 4), (4, 4)).planned()
    left, right = plan.batches[0].operands
    swapped = left._replace(buffers=left.buffers[::-1])
    with pytest.raises(GraphError, match="lies at byte 64, not at 0"):
        check_schedule(graph, changed(plan, 0, operands=(swapped, right)))
    with pytest.raises(
        GraphError, match="its results differ from the writes of its rows"
    ):
        check_schedule(graph, changed(plan, 0, results=(left,)))


def test_stacks_that_overlap_are_refused() -> None:
    graph, plan = of_lanes((4, 4), (4, 4)).planned()
    stack = plan.stacks[0]
    close = (stack._replace(step=32), *plan.stacks[1:])
    with pytest.raises(GraphError, match="are not adjacent in the arena"):
        check_schedule(graph, replace(plan, stacks=close))
    unplaced = replace(plan.memory, offsets={})
    with pytest.raises(GraphError, match="does not fit into 32 bytes"):
        check_schedule(graph, replace(plan, stacks=close, memory=unplaced))
    twice = (*plan.stacks, Stack(stack.storages, 64, "f32", "cpu"))
    with pytest.raises(GraphError, match="lies in two places"):
        check_schedule(graph, replace(plan, stacks=twice))


def test_stacks_that_no_step_needs_at_one_time_have_one_place() -> None:
    """Of a chain there are never more than three: a matrix, its gram, the next one."""
    for iterations in (2, 9):
        g = Products()
        for p in g.tensors("p", [(16, 16)] * 2):
            newton_schulz(g, p, iterations)
        _, plan = g.planned()
        assert len(plan.stacks) == 1 + 2 * iterations
        assert plan.memory.size == 3 * 2 * 16 * 16 * 4


def test_a_stack_in_the_place_of_one_that_is_needed_is_refused() -> None:
    graph, plan = of_lanes((16, 16), (16, 16)).planned()
    first, *_, last = (x.storages for x in plan.stacks)
    offsets = dict(plan.memory.offsets)
    for s, other in zip(last, first, strict=True):
        offsets[s] = offsets[other]
    gram = plan.stacks[1].storages
    for s, other in zip(gram, first, strict=True):
        offsets[s] = offsets[other]
    memory = replace(plan.memory, offsets=offsets)
    with pytest.raises(GraphError, match=r"share a place in the arena"):
        check_schedule(graph, replace(plan, memory=memory))
