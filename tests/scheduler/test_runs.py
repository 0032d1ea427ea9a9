"""Dependent kernels go block by block: eager's bits, little memory, one launch a run.

Blocks are forced to be small, so that a few parameters make many of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

import fuseopt
from bench.optimizers import LAMB, Adafactor
from fuseopt.backend import fuseopt as backend
from fuseopt.compiler import pipeline
from fuseopt.ir.alias import overlaps
from fuseopt.ir.graph import Graph, Kernel, Run, Schedule
from fuseopt.runtime import run_tables
from fuseopt.runtime.run_tables import RunTable, TempArena, cache_bytes
from fuseopt.scheduler import Machine, memory
from fuseopt.scheduler import runs as strands
from fuseopt.scheduler.tiles import tile
from tests.steps import differences, make_params, same_bits, set_grads

SHAPES = ((), (3,), (17, 5), (40,), (3, 4, 5), (181, 193), (8, 4, 3, 3), (2, 6000))
Plans = list[tuple[Graph, Schedule]]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    """What is planned with blocks of a strand each."""
    made: Plans = []
    inner = pipeline.schedule

    def seen(graph: Graph, *args: Any) -> Schedule:
        made.append((graph, inner(graph, *args)))
        return made[-1][1]

    monkeypatch.setattr(run_tables, "BLOCK", 1)
    monkeypatch.setattr(pipeline, "schedule", seen)
    yield made
    for graph, plan in made:
        for step in plan.steps:
            if isinstance(step, Run):
                assert in_order(graph, step) == []


@pytest.fixture
def arenas(monkeypatch: pytest.MonkeyPatch) -> list[TempArena]:
    """The arenas of all plans."""
    made: list[TempArena] = []
    inner = TempArena.__init__

    def seen(self: TempArena, *args: Any) -> None:
        inner(self, *args)
        made.append(self)

    monkeypatch.setattr(TempArena, "__init__", seen)
    return made


def only_run(plan: Schedule) -> Run:
    (run,) = [step for step in plan.steps if isinstance(step, Run)]
    return run


def in_order(graph: Graph, run: Run) -> list[tuple[Any, Any]]:
    """Lanes that meet in memory and do not run in the order of their kernels."""
    near = overlaps(graph.buffers)
    done: dict[int, list[tuple[int, bool]]] = {}
    wrong = []
    lanes = set()
    for block in run.blocks:
        for k, kernel in enumerate(run.kernels):
            for v, lane in block[k]:
                lanes.add((k, v, lane))
                variant = kernel.variants[v]
                touched = variant.touched(lane)
                for slot, b in zip(variant.slots, touched, strict=True):
                    for x in (b, *near.get(b, ())):
                        for other, written in done.get(x, ()):
                            if other > k and (slot.write or written):
                                wrong.append(((k, v, lane), other))
                    done.setdefault(b, []).append((k, slot.write))
    every = {
        (k, v, lane)
        for k, kernel in enumerate(run.kernels)
        for v, variant in enumerate(kernel.variants)
        for lane in range(variant.lanes)
    }
    assert lanes == every
    return wrong


def check(
    step: Callable[..., Any], make: Callable[[], list[Tensor]], times: int = 3
) -> list[str]:
    """Which tensors of a compiled step differ from eager's, over some steps."""
    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, options={"fallback": "error"})
    mine, theirs = make(), make()
    wrong = []
    for _ in range(times):
        got, want = compiled(*mine), step(*theirs)
        pairs = zip([*(got or ()), *mine], [*(want or ()), *theirs], strict=True)
        wrong += [f"{i}" for i, (g, w) in enumerate(pairs) if not same_bits(g, w)]
    return wrong


def rand(*shapes: tuple[int, ...]) -> Callable[[], list[Tensor]]:
    return lambda: [p.detach() for p in make_params(shapes)]


@pytest.mark.family(6)
@pytest.mark.parametrize("kind", [LAMB, Adafactor], ids=lambda k: k.__name__)
@pytest.mark.parametrize("most", [1, 50_000, 1 << 30])
def test_bits_over_blocks(
    kind: Any, most: int, plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tables, "BLOCK", most)
    before = torch.get_num_threads()
    eager_params, params = make_params(SHAPES), make_params(SHAPES)
    eager, mine = kind(eager_params), fuseopt.compile(kind(params))
    try:
        for seed, threads in enumerate((1, 2, 3, 1)):
            torch.set_num_threads(threads)
            set_grads(eager_params, params, seed)
            eager.step()
            mine.step()
            assert differences(eager_params, eager, params, mine) == []
    finally:
        torch.set_num_threads(before)
    report = fuseopt.reports()[-1]
    launches = {LAMB: 2, Adafactor: 4}[kind]
    names = "+".join(f"kernel{k}" for k in range(launches))
    assert report.launches == launches
    assert list(report.blocks) == [names], str(report)
    number = report.blocks[names]
    assert number == len(SHAPES) if most == 1 else 1 <= number < len(SHAPES)
    assert f"{number} block" in str(report)


class Clipped(torch.optim.Optimizer):
    """Layer-wise trust ratios of gradients clipped by their total norm; a parameter
    without a gradient is left alone.
    """

    def __init__(self, params: Any, clip: float = 1.0) -> None:
        super().__init__(params, {"lr": 0.1, "clip": clip})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            total = torch.stack([p.grad.norm() for p in params]).norm()
            scale = (group["clip"] / (total + 1e-6)).clamp(max=1.0)
            for p in params:
                update = p.grad * scale + 0.01 * p
                p.sub_(group["lr"] * p.norm() / update.norm() * update)


def test_a_total_norm_waits_for_all(plans: Plans) -> None:
    eager_params, params = make_params(SHAPES[1:] * 2), make_params(SHAPES[1:] * 2)
    eager, mine = Clipped(eager_params), fuseopt.compile(Clipped(params))
    for seed in range(4):
        set_grads(eager_params, params, seed)
        if seed == 2:  # from here on some have none
            for p in (*eager_params[::3], *params[::3]):
                p.grad = None
        if seed == 3:
            eager_params[1].grad = params[1].grad = None
        eager.step()
        mine.step()
        assert differences(eager_params, eager, params, mine) == []
    _, made = plans[0]
    kernels = [step for step in made.steps if isinstance(step, Kernel)]
    assert any(k.finish for k in kernels)  # the total norm's, alone
    run = only_run(made)
    assert not any(k.finish for k in run.kernels)
    assert len(run.blocks) == len(params)


def test_a_lane_that_two_lanes_use(plans: Plans) -> None:
    def step(p: Tensor, q: Tensor, r: Tensor, s: Tensor) -> None:
        for x, y, z in ((p, q, r), (s, p, s)):
            ratio = x.square().sum()
            y.add_(ratio)
            z.mul_(1 / (ratio + 1))

    assert check(step, rand((40,), (7, 5), (3, 50), (600,))) == []
    many = [list(map(len, block)) for block in only_run(plans[-1][1]).blocks]
    assert any(
        min(a, b) >= 1 and max(a, b) >= 2
        for own in many
        for a, b in itertools.pairwise(own)
    ), many


def overlapping(base: Tensor) -> None:
    a, b, c = base[:64], base[32:96], base[200:]
    n, m, k = a.norm(), b.norm(), c.norm()
    a.mul_(n)
    b.add_(m)
    c.mul_(k)


def test_overlapping_buffers_are_one_strand(plans: Plans) -> None:
    assert check(overlapping, rand((300,))) == []
    assert len(only_run(plans[-1][1]).blocks) == 2


def test_overlaps_that_nobody_asks_for_are_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_tables, "BLOCK", 1)
    monkeypatch.setattr(strands, "overlaps", lambda buffers: {})
    with pytest.raises(BackendCompilerFailed, match="leaves another"):
        check(overlapping, rand((300,)))
    monkeypatch.setattr(pipeline, "check_schedule", lambda graph, plan: None)
    assert check(overlapping, rand((300,))) != []


def test_changed_shapes_have_blocks_of_their_own(plans: Plans) -> None:
    def step(x: Tensor, y: Tensor) -> None:
        for t in (x, y):
            u = t * 0.5 + 1
            t.sub_(u / u.norm())

    compiled = torch.compile(step, backend=backend, dynamic=False)
    for n in (30, 5000, 30, 70):
        mine, theirs = rand((n,), (n, 3))(), rand((n,), (n, 3))()
        compiled(*mine)
        step(*theirs)
        assert all(map(same_bits, mine, theirs))
    assert len(plans) == 3


# ---------------------------------------------------------------- memory


def trusted(*params: Tensor) -> None:
    for p in params:
        update = p * 0.5 + 1
        p.sub_(0.01 * p.norm() / update.norm() * update)


def test_blocks_share_the_memory_of_their_temps(
    plans: Plans, arenas: list[TempArena]
) -> None:
    shapes = [(5000,)] * 10 + [(9000,)]
    assert check(trusted, rand(*shapes)) == []
    size = plans[-1][1].memory.size
    assert 9000 * 4 <= size <= 9000 * 4 + 11 * 5 * 64
    assert arenas[-1].arena is not None
    assert {d: (t.numel(), at) for d, (t, at) in arenas[-1].arena.items()} == {
        "cpu": (size, 0)
    }


def test_a_call_allocates_nothing(plans: Plans) -> None:
    compiled = torch.compile(trusted, backend=backend)
    params = rand(*[(5000,)] * 8)()
    compiled(*params)
    with torch.profiler.profile(profile_memory=True) as seen:
        compiled(*params)
    assert plans
    assert max((e.self_cpu_memory_usage for e in seen.key_averages()), default=0) <= 0


def test_a_large_arena_is_given_back(
    plans: Plans, arenas: list[TempArena], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tables, "KEPT", 0)
    assert check(trusted, rand(*[(5000,)] * 4)) == []
    assert plans[-1][1].memory.size
    assert arenas[-1].arena is None


def test_temps_in_one_place_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def place(offsets: dict[int, int], sizes: Any, at: int) -> int:
        for storage, n in sizes:
            offsets[storage] = 0
            at = max(at, n + 64)
        return at

    monkeypatch.setattr(memory, "_place", place)
    with pytest.raises(BackendCompilerFailed, match="share a place in the arena"):
        check(trusted, rand(*[(5000,)] * 4))
    monkeypatch.setattr(pipeline, "check_schedule", lambda graph, plan: None)
    assert check(trusted, rand(*[(5000,)] * 4)) != []


def test_kernels_in_another_order_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    made = RunTable.__init__

    def backwards(self: RunTable, *args: Any) -> None:
        made(self, *args)
        self.structs = type(self.structs)(*reversed(list(self.structs)))
        self.entries = type(self.entries)(*reversed(list(self.entries)))

    monkeypatch.setattr(RunTable, "__init__", backwards)
    assert check(trusted, rand((5000,))) != []


def test_what_is_returned_has_memory_of_its_own(plans: Plans) -> None:
    def step(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for t in (x, y):
            update = t * 0.5 + 1
            size = update.norm()
            t.sub_(update / size)
            kept += [update, size]
        return tuple(kept)

    compiled = torch.compile(step, backend=backend)
    mine = rand((5000,), (600,))()
    first = compiled(*mine)
    copies = [t.clone() for t in first]
    compiled(*mine)
    assert all(map(same_bits, first, copies))
    assert check(step, rand((5000,), (600,))) == []


def test_without_the_helper_blocks_go_one_by_one(
    plans: Plans, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = RunTable.__init__

    def alone(self: RunTable, *args: Any) -> None:
        made(self, *args)
        self.start = None

    monkeypatch.setattr(RunTable, "__init__", alone)
    assert check(trusted, rand(*[(50,)] * 4)) == []


# ---------------------------------------------------------------- sizes


def test_blocks_hold_what_fits(plans: Plans) -> None:
    assert check(trusted, rand(*[(1000,)] * 12)) == []
    graph, made = plans[-1]

    def lanes(most: int) -> list[int]:
        run = only_run(tile(graph, made, Machine(most)))
        return [len(block[0]) for block in run.blocks]

    assert lanes(1) == [1] * 12
    some = lanes(36_000)
    assert sum(some) == 12
    assert 1 < max(some) < 12
    assert lanes(1 << 30) == [12]


def test_the_size_of_the_cache(tmp_path: Path) -> None:
    assert cache_bytes(tmp_path) == run_tables.UNKNOWN
    for k, text in enumerate(("48K\n", "1024K\n", "32M\n", "odd\n")):
        (tmp_path / f"index{k}").mkdir()
        (tmp_path / f"index{k}" / "size").write_text(text)
    assert cache_bytes(tmp_path) == 32 << 20


def test_a_block_fits_the_processors_of_a_virtual_machine() -> None:
    """It may show the cache of its host: two processors do not fill a fourth of it."""
    block_bytes = run_tables.block_bytes
    assert block_bytes(32 << 20, 2) == 8 << 20
    assert block_bytes(480 << 20, 2) == 16 << 20
    assert block_bytes(480 << 20, 64) == 120 << 20
    assert len(run_tables.processors()) > 0
