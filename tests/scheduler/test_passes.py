"""The passes of the scheduler: each makes of a schedule another that does the same.

No torch. `passes` holds what each pass makes to the graph; what a pass must not do is
shown by a schedule that does it, and that the checks refuse.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from fuseopt.errors import GraphError
from fuseopt.ir.graph import Block, Extern, Graph, Kernel, MemoryPlan, Run, Schedule
from fuseopt.ir.printer import show_schedule
from fuseopt.ir.verifier import check_schedule
from fuseopt.scheduler import PASSES, Machine, memory, schedule
from tests.build_graphs import GraphBuilder, momentum, scaled
from tests.scheduler.test_stages import stacked

#: Blocks of one strand each.
SMALL = Machine(1)


def passes(graph: Graph, machine: Machine = SMALL) -> dict[str, Schedule]:
    """What each pass made that changed something, all of it checked, in order."""
    found: dict[str, Schedule] = {}

    def passed(name: str, made: Schedule | None) -> None:
        if made is not None:
            check_schedule(graph, made)
            found[name] = made

    last = schedule(graph, passed, machine)
    assert last is list(found.values())[-1]
    return found


def only_run(plan: Schedule) -> Run:
    (run,) = [step for step in plan.steps if isinstance(step, Run)]
    return run


def lanes_of(run: Run) -> list[list[int]]:
    """How many lanes of each kernel each block has."""
    return [[len(lanes) for lanes in block] for block in run.blocks]


def test_passes_have_names_and_an_order() -> None:
    assert [p.name for p in PASSES] == [
        *("finish", "begin", "runs", "tiles", "batches", "memory", "branches")
    ]


def test_a_pass_that_changes_nothing_returns_what_it_got() -> None:
    assert list(passes(momentum([(4,), (5,)]).graph())) == ["fusion"]
    graph = scaled(40, 50).graph()
    assert list(passes(graph)) == ["fusion", "runs", "tiles", "memory"]
    assert "runs" not in passes(graph, Machine())


# ---------------------------------------------------------------- finish


def norm_of_all(lanes: int = 3) -> GraphBuilder:
    g = GraphBuilder()
    ps = [g.tensor(f"p{i}", (3, 4)) for i in range(lanes)]
    g.foreach("div", ps, g.reduce("norm2", stacked(g, ps)))
    return g


def test_what_finishes_the_numbers_of_lanes_ends_their_kernel() -> None:
    made = passes(norm_of_all().graph(), Machine())
    assert [len(k.finish) for k in made["fusion"].kernels] == [0, 0, 0]
    assert [len(k.finish) for k in made["finish"].kernels] == [1, 0]


def test_a_finish_that_needs_elements_is_refused() -> None:
    """The quotients of the last kernel read tensors that lanes of the first read."""
    graph = norm_of_all().graph()
    first, last = schedule(graph).kernels
    too_much = replace(first, finish=(*first.finish, *last.variants))
    with pytest.raises(GraphError, match=r"is written in|leaves another"):
        check_schedule(graph, replace(schedule(graph), steps=(too_much,)))


# ---------------------------------------------------------------- begin


def summed_up(elements: int = 4, other: bool = False) -> GraphBuilder:
    """Norms that a call adds up over processes, and their total, which divides lanes.
    `other`: a lane reads these norms as well.
    """
    g = GraphBuilder()
    ps = [g.tensor(f"p{i}", (3, 4)) for i in range(3)]
    norms, q = g.tensor("norms", (elements,)), g.tensor("q", (elements,))
    g.extern("all_reduce", [norms], [norms])
    total = g.reduce("norm2", norms)
    if other:
        g.op("add", q, norms, out=q)
    g.foreach("div", ps, total)
    return g


def test_what_lanes_wait_for_begins_their_launch() -> None:
    made = passes(summed_up().graph())
    assert [len(k.first) for k in made["fusion"].kernels] == [0, 0]
    (kernel,) = made["begin"].kernels
    assert [len(kernel.first), len(kernel.variants)] == [1, 1]
    assert kernel.first[0].shapes == ((4,),)
    assert "before all others:" in show_schedule(summed_up().graph(), made["begin"])


def test_what_is_large_or_read_besides_has_a_launch_of_its_own() -> None:
    """So has all on machines whose launches are no calls of C."""
    assert "begin" not in passes(summed_up(elements=1 << 15).graph())
    assert "begin" not in passes(summed_up().graph(), Machine())
    assert "begin" not in passes(summed_up(other=True).graph())
    assert "begin" not in passes(norm_of_all().graph())


def test_what_a_call_in_between_needs_is_made_before_it() -> None:
    g = GraphBuilder()
    norms, p = g.tensor("norms", (4,)), g.tensor("p", (3, 4))
    total = g.reduce("norm2", norms)
    g.extern("all_reduce", [total], [total])
    g.op("div", p, total, out=p)
    assert "begin" not in passes(g.graph())


def test_a_beginning_that_comes_too_late_is_refused() -> None:
    """A total cannot end the launch whose lanes it divides."""
    graph = summed_up().graph()
    plan = schedule(graph, machine=SMALL)
    (kernel,) = plan.kernels
    late = replace(kernel, first=(), finish=kernel.first)
    steps = tuple(late if isinstance(s, Kernel) else s for s in plan.steps)
    with pytest.raises(GraphError, match=r"is written in|leaves another"):
        check_schedule(graph, replace(plan, steps=steps))
    twice = replace(kernel, first=(*kernel.first, *kernel.variants), variants=())
    steps = tuple(twice if isinstance(s, Kernel) else s for s in plan.steps)
    with pytest.raises(GraphError):
        check_schedule(graph, replace(plan, steps=steps))


# ---------------------------------------------------------------- runs


def test_kernels_that_follow_each_other_go_block_by_block() -> None:
    made = passes(scaled(40, 50, 60).graph())
    assert [k.name for k in made["fusion"].kernels] == ["kernel0", "kernel1"]
    run = only_run(made["runs"])
    assert run.name == "kernel0+kernel1"
    assert run.kernels == made["fusion"].kernels
    assert lanes_of(run) == [[1, 1]] * 3


def test_an_extern_and_a_total_norm_end_a_run() -> None:
    g = scaled(40, 50)
    p = 0
    g.extern("aten.special", [p], [p])
    scaled_again = g.reduce("norm2", p)
    g.op("div", p, scaled_again, out=p)
    steps = passes(g.graph())["runs"].steps
    assert [type(s) for s in steps] == [Run, Extern, Run]
    assert not any(
        isinstance(s, Run) for s in passes(norm_of_all().graph())["memory"].steps
    )


def test_other_devices_and_machines_have_no_runs() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (40,), device="cuda:0")
    g.op("div", p, g.reduce("norm2", p), out=p)
    for graph, machine in ((g.graph(), SMALL), (scaled(40).graph(), Machine())):
        last = list(passes(graph, machine).values())[-1]
        assert [type(s) for s in last.steps] == [Kernel, Kernel]
        assert len(last.memory.offsets) == (machine is SMALL)  # the norm, on the device


def test_views_that_overlap_are_in_one_block() -> None:
    g = GraphBuilder()
    flat = g.tensor("flat", (300,))
    views = [g.view(flat, f"v{k}", (64,), k) for k in (0, 32, 200)]
    norms = [g.reduce("norm2", v) for v in views]
    for v, norm in zip(views, norms, strict=True):
        g.op("mul", v, norm, out=v)
    run = only_run(passes(g.graph())["runs"])
    assert sorted(sum(own) for own in lanes_of(run)) == [2, 4]


def test_blocks_in_which_lanes_are_missing_or_late_are_refused() -> None:
    graph = scaled(40, 50).graph()
    plan = passes(graph)["runs"]
    run = only_run(plan)
    one, two = run.blocks

    def check(*blocks: Block) -> None:
        steps = (replace(run, blocks=blocks),)
        check_schedule(graph, replace(plan, steps=steps))

    check(one, two)
    check(two, one)
    for blocks, message in (
        ((one,), "of kernel0 is not in one block"),
        ((one, one, two), "of kernel0 is not in one block"),
        ((one, (two[0],)), "block 1 has lanes of 1 kernels, not of 2"),
        # a lane's second kernel before its first
        ((((), one[1]), (one[0], ()), two), "leaves another p0"),
        (((one[0], two[1]), (two[0], one[1])), "leaves another p1"),
    ):
        with pytest.raises(GraphError, match=message):
            check(*blocks)  # type: ignore[arg-type]


def test_a_run_of_a_kernel_with_a_finish_is_refused() -> None:
    graph = norm_of_all().graph()
    plan = schedule(graph)
    kernels = plan.kernels
    block = tuple(
        tuple((v, x) for v, own in enumerate(k.variants) for x in range(own.lanes))
        for k in kernels
    )
    with pytest.raises(GraphError, match="kernel0 ends with a finish"):
        check_schedule(graph, replace(plan, steps=(Run(kernels, (block,)),)))
    alone = Run(kernels[1:], (block[1:],))
    with pytest.raises(GraphError, match="a run of one kernel"):
        check_schedule(graph, replace(plan, steps=(kernels[0], alone)))


# ---------------------------------------------------------------- tiles


def test_a_block_has_as_many_strands_as_fit() -> None:
    graph = scaled(*[100] * 12).graph()
    strand = 4 * (100 + 100 + 1)  # p, update, and the ratio between the kernels
    for most, blocks in (
        (1, [1] * 12),
        (strand - 1, [1] * 12),
        (3 * strand, [3] * 4),
        (5 * strand, [5, 5, 2]),
        (1 << 30, [12]),
    ):
        run = only_run(passes(graph, Machine(most))["memory"])
        assert lanes_of(run) == [[n, n] for n in blocks]


def test_lanes_of_a_block_keep_the_order_of_their_kernel() -> None:
    run = only_run(passes(scaled(*range(40, 60)).graph(), Machine(1 << 20))["memory"])
    for block in run.blocks:
        assert all(list(lanes) == sorted(lanes) for lanes in block)
    part = run.part(run.blocks[0], 1)
    assert part == run.kernels[1]


# ---------------------------------------------------------------- memory


def test_temps_of_blocks_follow_each_other_in_one_place() -> None:
    graph = scaled(5000, 2000, 9000).graph()
    plan = passes(graph)["memory"].memory
    names = {
        graph.buffers[b].storage: graph.buffers[b] for b in range(len(graph.buffers))
    }
    large = {names[s].shape: at for s, at in plan.offsets.items() if names[s].shape}
    assert len(set(large.values())) == 1
    small = [at for s, at in plan.offsets.items() if not names[s].shape]
    assert len(set(small)) == len(small) == 3
    (at,) = set(large.values())
    assert at >= max(small) + 4
    assert plan.size == at + 36_032  # of the largest, in steps of 64 bytes


def test_many_small_temps_of_one_storage_have_memory_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The norms of more than 1,024 tensors were given memory one by one at each call:
    a clip of 1,164 took 8 ms.
    """
    monkeypatch.setattr(memory, "SMALL", 64)
    g = GraphBuilder()
    ps = [g.tensor(f"p{i}", (2,)) for i in range(20)]
    stack = stacked(g, ps)
    g.foreach("div", ps, g.reduce("norm2", stack))
    graph = g.graph()
    made = passes(graph)["memory"]
    assert stack in made.memory.offsets
    assert {graph.buffers[t].storage for t in made.temps} == {*made.memory.offsets}


def test_what_others_see_has_memory_of_its_own() -> None:
    """An output, what an extern reads, and what an extern returns."""
    g = scaled(5000)
    p = 0
    kept, read, made = (g.op("mul", p, k) for k in (2.0, 3.0, 4.0))
    returned = g.like(p, "returned")
    g.outputs.append(kept)
    g.extern("aten.special", [read], [returned])
    g.op("add", p, returned, out=p)
    g.op("add", p, made, out=p)
    graph = g.graph()
    made_by_passes = passes(graph)["memory"]
    plan = made_by_passes.memory
    assert not {kept, read, returned} & plan.offsets.keys()
    assert plan.returned == {returned}
    assert plan.loose == frozenset()  # a kernel reads it
    text = show_schedule(graph, made_by_passes)
    assert "returned by externs: returned" in text
    assert "allocated at each call: " in text


def test_what_externs_alone_see_may_keep_its_strides() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    one, two = g.like(p, "one"), g.like(p, "two")
    g.extern("aten.special", [p], [one])
    g.extern("aten.special", [one], [two])
    g.op("add", p, two, out=p)
    plan = passes(g.graph())["memory"].memory
    assert (plan.returned, plan.loose) == ({one, two}, {one})


def test_what_no_later_step_touches_is_given_back() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (4,))
    half, one, two = g.op("mul", p, 0.5), g.like(p, "one"), g.like(p, "two")
    g.extern("aten.special", [half], [one])
    g.extern("aten.special", [one], [two])
    g.op("add", p, two, out=p)
    g.outputs.append(g.like(p, "kept"))
    g.extern("aten.special", [p], [g.outputs[0]])
    graph = g.graph()
    made = passes(graph)["memory"]
    assert [step.name for step in made.steps] == [
        *("kernel0", "aten.special", "aten.special", "kernel1", "aten.special")
    ]
    assert made.memory.freed == ((), (half,), (one,), (), ())
    assert "  gives back one\n" in show_schedule(graph, made)

    for freed, message in (
        (((), (half, one), (), (), ()), "frees one too early"),
        (((half,), (), (), (), ()), "frees t1 too early"),
        (((), (), (), (), (g.outputs[0],)), "frees kept too early"),
        (((), (), (), (), (p,)), "frees p, which is not a temp"),
        (((), (half,)), "freed after 2 steps of 5"),
    ):
        plan = replace(made.memory, freed=freed)
        with pytest.raises(GraphError, match=message):
            check_schedule(graph, replace(made, memory=plan))


def test_temps_that_lie_where_others_do_are_refused() -> None:
    graph = scaled(5000, 2000).graph()
    made = passes(graph, Machine(1 << 30))["memory"]  # one block
    check_schedule(graph, made)
    storages = list(made.memory.offsets)
    large = [s for s in storages if graph.buffers[s].shape]

    def check(offsets: dict[int, int], **more: object) -> None:
        plan = replace(made.memory, offsets={**made.memory.offsets, **offsets}, **more)
        check_schedule(graph, replace(made, memory=plan))

    for offsets, message in (
        ({large[1]: made.memory.offsets[large[0]]}, "share a place in the arena"),
        ({large[0]: 3}, "lies from 3"),
        ({large[0]: made.memory.size}, "arena of"),
        ({large[0]: -64}, "lies from -64"),
        ({0: 0}, "p0 is no temp, or its device has no part"),
        ({4711: 0}, "storage 4711 is no temp, or its device has no part"),
    ):
        with pytest.raises(GraphError, match=message):
            check(offsets)
    with pytest.raises(GraphError, match="is returned by no extern"):
        check({}, returned=frozenset({large[0]}))
    with pytest.raises(GraphError, match="is loose, but"):
        check({}, loose=frozenset({large[0]}))


def test_a_temp_that_is_gone_before_it_is_read_is_refused() -> None:
    """Two strands in blocks of their own whose temps share a place; then the kernels
    one after another, over all lanes.
    """
    graph = scaled(5000, 2000).graph()
    made = passes(graph)["memory"]
    check_schedule(graph, made)
    one_by_one = replace(made, steps=made.kernels)
    with pytest.raises(GraphError, match="share a place in the arena"):
        check_schedule(graph, one_by_one)
    run = only_run(made)
    by_kernel = tuple(
        ((lanes, ()) if k == 0 else ((), lanes))
        for k in (0, 1)
        for lanes in (block[k] for block in run.blocks)
    )
    steps = (replace(run, blocks=by_kernel),)
    with pytest.raises(GraphError, match="leaves another p0"):
        check_schedule(graph, replace(made, steps=steps))
    # with places of their own the same order does what the graph does
    check_schedule(graph, replace(made, steps=steps, memory=MemoryPlan()))


def test_an_arena_that_an_extern_sees_is_refused() -> None:
    g = GraphBuilder()
    p = g.tensor("p", (40,))
    half = g.op("mul", p, 0.5)
    g.extern("aten.special", [half], [p])
    graph = g.graph()
    plan = schedule(graph, machine=SMALL)
    assert plan.memory.offsets == {}
    seen = replace(plan.memory, offsets={half: 0}, size=192)
    with pytest.raises(GraphError, match="is seen by others than kernels"):
        check_schedule(graph, replace(plan, memory=seen))


# ---------------------------------------------------------------- text


def test_show_tells_of_blocks_and_places() -> None:
    graph = scaled(5000, 2000, 9000).graph()
    text = show_schedule(graph, passes(graph)["memory"])
    assert "kernel0+kernel1: block by block, 3 in all\n" in text
    assert "  lanes of each kernel: (1, 1), (1, 1), (1, 1)\n" in text
    assert "  arena of 36" in text


def test_the_text_does_not_grow_with_lanes() -> None:
    few, many = (scaled(*[500] * n).graph() for n in (10, 300))
    few_lines, many_lines = (
        len(show_schedule(g, passes(g)["memory"]).splitlines()) for g in (few, many)
    )
    assert few_lines == many_lines
