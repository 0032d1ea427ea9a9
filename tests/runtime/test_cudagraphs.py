"""Launches of a step captured once and replayed: on the simulated accelerator."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import session
from fuseopt.config import resolve
from fuseopt.errors import ConfigError, CudaGraphError, LaunchError
from fuseopt.runtime.cudagraphs import KEPT, Site
from tests.papers.momentum import Lion
from tests.papers.reducing import LAMB
from tests.simulated.twins import SHAPES, SINGLE, Clipped, SimTwins

pytest.importorskip("triton")

PLAIN = partial(torch.optim.SGD, lr=0.1, weight_decay=0.01, foreach=True)
SGD = partial(PLAIN, momentum=0.9)
ADAGRAD = partial(torch.optim.Adagrad, lr=0.1, foreach=True)
ADAMW = partial(torch.optim.AdamW, lr=0.01, foreach=True, capturable=True)


def replaying(twins: SimTwins) -> SimTwins:
    """Twins whose next step is a replay."""
    for _ in range(4):
        twins.step()
    assert twins.report.cudagraph == "captured"
    return twins


# ---------------------------------------------------------------- replays


def test_the_second_step_is_captured_and_then_replayed(sim: ModuleType) -> None:
    twins = SimTwins(PLAIN)
    twins.set_grads()
    with sim.counting() as first:
        twins.optimizer.step()
    assert (first.launches, first.captures, first.replays) == (1, 0, 0)
    assert twins.report.cudagraph == "the second call is captured"
    with sim.counting() as second:
        twins.optimizer.step()
    # it was recorded, which runs nothing, and replayed
    assert (second.launches, second.captures, second.replays) == (0, 1, 1)
    assert twins.report.cudagraph == "captured"
    for _ in range(3):
        with sim.counting() as later:
            twins.optimizer.step()
        assert (later.launches, later.captures, later.replays) == (0, 0, 1)


def test_a_step_whose_tensors_stay_sends_nothing_and_waits_for_nothing(
    sim: ModuleType,
) -> None:
    twins = replaying(SimTwins(SGD))
    twins.step(stay=True)
    with sim.counting() as found:
        twins.optimizer.step()
    assert (found.replays, found.h2d, found.d2d, found.d2h) == (1, 0, 0, 0)
    assert (found.syncs, found.allocations, found.pinned) == (0, 0, 0)


def test_moved_grads_are_one_small_copy_and_no_grad_is_copied(sim: ModuleType) -> None:
    twins = replaying(SimTwins(SGD, [(64, 64)] * 8))
    twins.set_grads()
    sim.synchronize()
    with sim.counting() as found:
        twins.optimizer.step()
    assert (found.captures, found.replays) == (0, 1)
    assert (found.h2d, found.h2d_blocking, found.d2d) == (1, 0, 0)
    # a record of each lane, not a byte of the tensors
    assert found.h2d_bytes <= 8 * 8 * 10
    assert found.syncs == 0


def test_one_grad_that_moved_sends_one_record(sim: ModuleType) -> None:
    twins = replaying(SimTwins(SGD, [(8,)] * 100))
    twins.step(stay=True)
    twins.params[50].grad = twins.params[50].grad.clone()
    with sim.counting() as found:
        twins.optimizer.step()
    assert (found.h2d, found.replays) == (1, 1)
    assert found.h2d_bytes <= 8 * 10


def test_moved_grads_and_a_new_learning_rate_are_one_copy(sim: ModuleType) -> None:
    twins = SimTwins(SGD)
    for k in range(4):
        twins.set(lr=0.1 / (k + 1))
        twins.step()
    twins.set(lr=0.02)
    twins.set_grads()
    with sim.counting() as found:
        twins.optimizer.step()
    assert (found.h2d, found.captures, found.replays) == (1, 0, 1)


def test_a_new_learning_rate_alone_sends_rows_alone(sim: ModuleType) -> None:
    twins = SimTwins(SGD, [(8,)] * 100)
    for k in range(4):
        twins.set(lr=0.1 / (k + 1))
        twins.step(stay=True)
    twins.set(lr=0.02)
    with sim.counting() as found:
        twins.optimizer.step()
    assert (found.h2d, found.replays) == (1, 1)
    assert found.h2d_bytes <= 8 * 16


LIVE: list[tuple[Any, list[dict[str, Any]]]] = [
    (
        SGD,
        [{"lr": 0.05}, {"momentum": 0.8}, {"weight_decay": 0.02}, {"lr": 0.03}],
    ),
    (
        partial(SGD, lr=torch.tensor(0.1)),
        [{"lr": 0.05}, {"lr": 0.025}, {"momentum": 0.7}, {"lr": 0.01}],
    ),
    (
        ADAMW,
        [
            {"lr": 0.02},
            {"betas": (0.8, 0.99)},
            {"eps": 1e-6},
            {"weight_decay": 0.3},
            {"lr": 0.01, "betas": (0.85, 0.98)},
        ],
    ),
    (
        LAMB,
        [
            {"lr": 0.02},
            {"betas": (0.8, 0.99)},
            {"eps": 1e-5},
            {"weight_decay": 0.3},
            {"lr": 0.01},
        ],
    ),
    (ADAGRAD, [{"lr": 0.02}, {"eps": 1e-6}, {"weight_decay": 0.3}, {"lr": 0.01}]),
    (Lion, [{"lr": 0.02}, {"betas": (0.8, 0.9)}, {"weight_decay": 0.3}, {"lr": 0.01}]),
]


@pytest.mark.family(6)
@pytest.mark.parametrize(
    ("make", "changes"),
    LIVE,
    ids=["SGD", "SGD-tensor", "AdamW", "LAMB", "Adagrad", "Lion"],
)
def test_hyperparameters_are_live(
    make: Any, changes: list[dict[str, Any]], sim: ModuleType
) -> None:
    def own(params: list[Any]) -> torch.optim.Optimizer:
        given = getattr(make, "keywords", {})
        place = params[0].device
        tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor)}
        fresh = {k: v.clone().to(place) for k, v in tensors.items()}
        made: torch.optim.Optimizer = make(params, **fresh)
        return made

    twins = SimTwins(own, SINGLE if make is LAMB else SHAPES)
    for change in ({}, {}, {}, *changes, {}, {"lr": 0.005}, {"lr": 0.004}):
        twins.set(**change)
        twins.step()
        assert twins.differences() == [], f"after {change}"
    compiled = len(fuseopt.reports())
    with sim.counting() as found:
        twins.set(lr=0.003)
        twins.step()
    assert twins.differences() == []
    assert (found.captures, found.launches, found.replays) == (0, 0, 1)
    assert len(fuseopt.reports()) == compiled


@pytest.mark.slow
def test_clipping_by_the_total_norm_is_replayed_with_it(sim: ModuleType) -> None:
    """Kernels with memory in between; `max_norm` is live, the norm the caller's."""
    shapes = ((17, 5), (40,))
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator) for s in shapes]

    def tail(params: list[Any], optimizer: Any, limit: Any) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(params, limit, foreach=True)
        optimizer.step()
        return norm

    ours = [torch.nn.Parameter(t.to("sim")) for t in start]
    theirs = [torch.nn.Parameter(t.clone()) for t in start]
    run = torch.compile(tail, backend="fuseopt")
    optimizers = [torch.optim.SGD(x, lr=0.1, foreach=True) for x in (ours, theirs)]
    norms: list[torch.Tensor] = []
    kept: list[Any] = []
    for k in range(7):
        limit = 1.0 if k < 3 else 1.0 / k
        kept.append([p.grad for p in ours])
        for p, q in zip(theirs, ours, strict=True):
            # one whole number in each, so that no norm is rounded
            p.grad = torch.zeros(p.shape)
            p.grad.view(-1)[0] = torch.randint(1, 9, (), generator=generator)
            q.grad = p.grad.to("sim")
        want = tail(theirs, optimizers[1], limit)
        norms += [run(ours, optimizers[0], limit), want]
        for p, q in zip(theirs, ours, strict=True):
            assert torch.equal(q.detach().cpu(), p.detach())
    # those of earlier steps too: no later replay wrote over them
    assert [t.item() for t in norms[::2]] == [t.item() for t in norms[1::2]]
    assert len({t.item() for t in norms}) > 2
    states = {r.cudagraph for r in fuseopt.reports() if not r.fallback}
    assert "captured" in states
    assert sim.counters().replays > 4


def test_two_steps_on_two_streams_take_turns_in_the_memory_they_share(
    sim: ModuleType,
) -> None:
    """What kernels make for one another lies in a pool that graphs share."""
    twins = [SimTwins(Clipped, whole=True), SimTwins(Clipped, SHAPES[:2], whole=True)]
    streams = [sim.Stream(), sim.Stream()]
    for _ in range(5):
        for pair, stream in zip(twins, streams, strict=True):
            with sim.stream(stream):
                pair.step()
    for pair, stream in zip(twins, streams, strict=True):
        with sim.stream(stream):
            assert pair.differences() == []
    assert sim.counters().replays >= 4


class Summed(torch.optim.Optimizer):
    """A step with an ATen call in place: no memory between launches."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)
                p.cumsum_(0)


def test_two_steps_with_aten_calls_take_turns_without_memory_of_their_own(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an ATen call allocates within itself lies in the pool that graphs share."""
    turns: list[Any] = []
    earlier = {*session.graphs.replays}
    wait = Site.wait

    def waited(site: Site) -> None:
        turns.append(site.module.current_stream(site.device))
        wait(site)

    monkeypatch.setattr(Site, "wait", waited)
    twins = [SimTwins(Summed, [(6,)]), SimTwins(Summed, [(4,)])]
    streams = [sim.Stream(), sim.Stream()]
    for _ in range(4):
        for pair, stream in zip(twins, streams, strict=True):
            with sim.stream(stream):
                pair.step(stay=True)
    assert twins[0].report.externs
    held = [h for r in session.graphs.replays - earlier for h in r.held.values()]
    assert [len(h.temps[0]) for h in held] == [0, 0]
    assert {*turns} == {*streams}
    for pair, stream in zip(twins, streams, strict=True):
        with sim.stream(stream):
            assert pair.differences() == []


def test_no_garbage_is_collected_within_a_capture(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a kernel of another step, and unloading it break the capture."""
    on = []
    for name in ("capture_begin", "capture_end"):
        whole = getattr(sim.CUDAGraph, name)

        def noted(*args: Any, _whole: Any = whole, **more: Any) -> Any:
            on.append(gc.isenabled())
            return _whole(*args, **more)

        monkeypatch.setattr(sim.CUDAGraph, name, noted)
    replaying(SimTwins(SGD))
    assert on == [False, False]
    assert gc.isenabled()


@pytest.mark.slow
def test_an_optimizer_after_another_is_captured_too(sim: ModuleType) -> None:
    """The pool of graphs that are all gone is not used again: torch forbids it."""
    for _ in range(3):
        twins = SimTwins(SGD, cudagraphs="require")
        for _ in range(4):
            twins.step()
        assert twins.report.cudagraph == "captured"
        assert twins.differences() == []
        del twins
        gc.collect()


@pytest.mark.slow
def test_two_optimizers_share_a_pool_and_one_goes(sim: ModuleType) -> None:
    first, second = replaying(SimTwins(SGD)), replaying(SimTwins(PLAIN))
    pools = {g.pool() for r in session.graphs.replays for g in graphs_of(r)}
    assert len(pools) == 1
    del first
    gc.collect()
    third = replaying(SimTwins(SGD, ((5,),)))
    pools |= {g.pool() for r in session.graphs.replays for g in graphs_of(r)}
    assert len(pools) == 1
    for twins in (second, third):
        twins.step()
        assert twins.differences() == []


def graphs_of(replays: Any) -> list[Any]:
    """The graphs that a plan holds."""
    return [g for held in replays.held.values() for _, g in held.graphs]


def test_other_strides_are_captured_anew(sim: ModuleType) -> None:
    """The old graph goes before the new one is captured, and with it the pool's use."""
    twins = SimTwins(SGD, ((4, 6),), cudagraphs="require")
    (p,), (q,) = twins.params, twins.eager_params
    turned = False
    for _ in range(3):
        for _ in range(3):
            twins.set_grads()
            grad = q.grad
            assert grad is not None
            if turned:
                p.grad = grad.t().contiguous().to("sim").t()
            twins.step_eager()
            twins.optimizer.step()
            assert twins.differences() == []
        assert twins.report.cudagraph == "captured"
        turned = not turned
    assert sim.counters().captures >= 2


# ---------------------------------------------------------------- what is not captured


def test_one_launch_is_captured_only_if_asked_for(sim: ModuleType) -> None:
    """A replay starts one thing, too: nothing is won, memory and a call are lost."""
    twins = SimTwins(SGD, cudagraphs="auto")
    for _ in range(4):
        with sim.counting() as found:
            twins.step()
        assert (found.launches, found.captures, found.replays) == (1, 0, 0)
    assert twins.report.cudagraph.startswith("off: a replay takes as long")
    assert twins.differences() == []


@pytest.mark.slow
def test_two_launches_are_captured_unasked(sim: ModuleType) -> None:
    twins = SimTwins(Clipped, whole=True, cudagraphs="auto")
    for _ in range(3):
        twins.step()
    with sim.counting() as found:
        twins.step()
    assert (found.launches, found.replays) == (0, 1)
    assert twins.report.cudagraph == "captured"
    assert twins.differences() == []


def test_an_aten_call_beside_one_launch_is_captured_unasked(sim: ModuleType) -> None:
    twins = SimTwins(Projected, [(6, 6)], cudagraphs="auto")
    for _ in range(3):
        twins.step(stay=True)
    assert twins.report.externs
    assert twins.report.launches == 1
    assert twins.report.cudagraph == "captured"


def test_off_runs_each_launch(sim: ModuleType) -> None:
    twins = SimTwins(SGD, cudagraphs=False)
    for _ in range(3):
        twins.step()
    assert (sim.counters().launches, sim.counters().captures) == (3, 0)
    assert twins.report.cudagraph.startswith("off")
    assert twins.differences() == []


def test_a_broken_capture_is_reported_and_leaves_no_half_step(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = SimTwins(PLAIN)
    twins.step()
    before = sim.CUDAGraph.capture_end

    def broken(self: Any) -> None:
        before(self)
        raise RuntimeError("injected: no graph today")

    monkeypatch.setattr(sim.CUDAGraph, "capture_end", broken)
    with sim.counting() as found:
        twins.step()
    # and one more, for the generator
    assert (found.captures, found.launches, found.replays) == (2, 1, 0)
    assert twins.report.cudagraph == "off: capture failed: injected: no graph today"
    monkeypatch.undo()
    assert not sim.is_current_stream_capturing()
    for _ in range(2):
        twins.step()
    assert twins.differences() == []
    assert sim.counters().captures == 2


@pytest.mark.parametrize("where", ["begin", "in it", "end"])
def test_random_numbers_are_drawn_after_a_broken_capture(
    where: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a broken capture left of the generator's state is put right."""
    twins = SimTwins(PLAIN)
    twins.step()
    begin, fail = sim.CUDAGraph.capture_begin, sim.fail_launch
    broken: list[Any] = []

    def breaking(self: Any, *args: Any, **kwargs: Any) -> None:
        if broken:
            begin(self, *args, **kwargs)
            return
        broken.append(self)
        if where == "begin":
            # after the generator was told
            kwargs["pool"] = gone
        begin(self, *args, **kwargs)
        if where == "in it":
            fail()
        if where == "end":
            with pytest.raises(RuntimeError):
                sim.synchronize()

    gone = sim.graph_pool_handle()
    with sim.graph(first := sim.CUDAGraph(), pool=gone):
        sim.enqueue(lambda: None)
    first.reset()
    monkeypatch.setattr(sim.CUDAGraph, "capture_begin", breaking)
    twins.step()
    assert broken
    assert twins.report.cudagraph.startswith("off: capture failed")
    assert not sim.is_current_stream_capturing()
    torch.rand(1, device="sim")
    torch.nn.functional.dropout(torch.ones(4, device="sim"))
    twins.step()
    assert twins.differences() == []


@pytest.mark.slow
def test_a_launch_that_fails_in_a_capture_breaks_nothing(sim: ModuleType) -> None:
    twins = SimTwins(LAMB, SINGLE)
    for _ in range(4):
        twins.step()
    twins.set_grads()
    torch._dynamo.reset()
    twins = SimTwins(ADAMW)
    twins.step()
    sim.fail_launch()
    twins.step()
    assert twins.report.cudagraph.startswith("off: capture failed: kernel0 failed")
    assert twins.differences() == []
    twins.step()
    assert twins.differences() == []


def test_require_raises_where_nothing_can_be_captured(sim: ModuleType) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fuseopt.compile(torch.optim.SGD([p], lr=0.1), cudagraphs="require")
    with pytest.raises(Exception, match="cannot be captured in a graph: no kernel"):
        optimizer.step()
    assert p.tolist() == [1.0, 1.0, 1.0]


def test_require_raises_before_anything_is_written(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = SimTwins(PLAIN, cudagraphs="require")
    twins.step()
    assert twins.differences() == []

    def broken(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(sim.CUDAGraph, "capture_begin", broken)
    with pytest.raises(CudaGraphError, match=r"capture failed: injected.*require"):
        twins.optimizer.step()
    assert twins.differences() == []


class Projected(torch.optim.Optimizer):
    """A step with a product of matrices, which stays an ATen call."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_((p.grad @ p.grad.mT) @ p * 0.01)


def test_aten_calls_are_captured_for_the_places_of_their_tensors(
    sim: ModuleType,
) -> None:
    twins = SimTwins(Projected, ((6, 4), (3, 5)))
    twins.step()
    for _ in range(3):
        twins.step(stay=True)
    assert twins.report.externs
    assert twins.report.cudagraph == "captured"
    assert twins.differences() == []
    captures = sim.counters().captures
    assert captures == 1
    # a grad that moves is read where it is: by a call without a graph
    with sim.counting() as found:
        twins.step()
    assert (found.captures, found.replays, found.launches > 0) == (0, 0, True)
    assert twins.differences() == []
    with sim.counting() as found:
        twins.step(stay=True)
    assert (found.captures, found.replays) == (1, 1)
    assert twins.differences() == []


def test_graphs_of_aten_calls_are_few(sim: ModuleType) -> None:
    twins = SimTwins(Projected, ((6, 4),))
    for _ in range(12):
        twins.step()
        twins.step(stay=True)
        for replays in session.graphs.replays:
            assert len(replays.held) <= KEPT
    assert twins.differences() == []
    # each was replayed once: it is not worth it
    assert "move too often" in twins.report.cudagraph


def test_other_shapes_are_another_graph_and_old_ones_are_kept(sim: ModuleType) -> None:
    twins = replaying(SimTwins(SGD, ((4, 6),)))
    (p,) = twins.params
    (q,) = twins.eager_params
    for k in range(4):
        twins.set_grads()
        if k % 2:
            grad = q.grad
            assert grad is not None
            p.grad = grad.t().contiguous().to("sim").t()
        with sim.counting() as found:
            twins.step_eager()
            twins.optimizer.step()
        assert found.replays + found.launches == 1
        assert twins.differences() == []


# ---------------------------------------------------------------- release


def live_graphs(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A WeakSet of the graphs that are made from now on."""
    made: weakref.WeakSet[Any] = weakref.WeakSet()
    start = sim.CUDAGraph.capture_begin

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        made.add(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(sim.CUDAGraph, "capture_begin", begin)
    return made


@pytest.mark.family(2)
@pytest.mark.parametrize("isolated", [True, False])
def test_graphs_go_with_their_optimizer(
    isolated: bool, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = live_graphs(sim, monkeypatch)
    params = [torch.nn.Parameter(torch.ones(5, device="sim"))]
    optimizer = torch.optim.SGD(params, lr=0.1)
    if isolated:
        step = fuseopt.compile(optimizer, cudagraphs=True).step
    else:
        options = {"cudagraphs": True}
        step = torch.compile(optimizer.step, backend="fuseopt", options=options)
    params[0].grad = torch.ones(5, device="sim")
    for _ in range(3):
        step()
    assert len(made) == 1
    del optimizer, step
    gc.collect()
    assert len(made) == 0


@pytest.mark.slow
def test_graphs_go_with_a_reset(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = live_graphs(sim, monkeypatch)
    twins = replaying(SimTwins(Clipped, whole=True))
    assert len(made) > 0
    torch._dynamo.reset()
    assert len(made) == 0
    assert not session.graphs.sites
    # and a step after it is whole
    for _ in range(3):
        twins.step()
    assert twins.differences() == []


def test_graphs_go_before_a_process_group_does(
    sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    made = live_graphs(sim, monkeypatch)
    monkeypatch.setattr(
        distributed.ProcessGroup, "shutdown", distributed.ProcessGroup.shutdown
    )
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    alive: list[int] = []
    try:
        twins = replaying(SimTwins(SGD))
        assert len(made) == 1
        before = session.graphs.release
        monkeypatch.setattr(
            session.graphs, "release", lambda: (alive.append(len(made)), before())
        )
    finally:
        distributed.destroy_process_group()
    assert len(made) == 0
    for _ in range(3):
        twins.step()
    assert twins.differences() == []


# ---------------------------------------------------------------- options


def test_the_modes_of_torch_compile(sim: ModuleType) -> None:
    assert resolve(None, None, {}).cudagraphs == "auto"
    assert resolve("reduce-overhead", None, {}).cudagraphs is True
    assert resolve("max-autotune", None, {}).cudagraphs is True
    assert resolve("max-autotune-no-cudagraphs", None, {}).cudagraphs is False
    options = {"cudagraphs": "require"}
    assert resolve("max-autotune-no-cudagraphs", options, {}).cudagraphs == "require"
    with pytest.raises(ConfigError, match="cudagraphs='no'"):
        resolve(None, {"cudagraphs": "no"}, {})


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("0", False), ("YES", True), ("require", "require"), ("auto", "auto")],
)
def test_the_variable_of_the_environment(value: str, wanted: Any) -> None:
    env = {"FUSEOPT_CUDAGRAPHS": value}
    assert resolve(None, None, env).cudagraphs == wanted
    assert resolve("reduce-overhead", None, env).cudagraphs is True
    assert resolve(None, {"cudagraphs": False}, env).cudagraphs is False
    with pytest.raises(ConfigError, match="FUSEOPT_CUDAGRAPHS"):
        resolve(None, None, {"FUSEOPT_CUDAGRAPHS": "perhaps"})


def test_a_step_on_the_cpu_says_nothing_of_graphs() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = fuseopt.compile(torch.optim.SGD([p], lr=0.1))
    optimizer.step()
    assert fuseopt.reports()[-1].cudagraph == ""


# ---------------------------------------------------------------- captures of the user


def test_a_step_joins_a_capture_that_is_under_way(sim: ModuleType) -> None:
    """The graph does that call's step again, with its grads and its numbers, whatever
    other calls do in between.
    """
    twins = SimTwins(SGD)
    for _ in range(3):
        twins.step()
    twins.set_grads()
    pairs = list(zip(twins.eager_params, twins.params, strict=True))
    grads = [(p.grad, q.grad) for p, q in pairs]
    graph = sim.CUDAGraph()
    before = [p.detach().cpu() for p in twins.params]
    with sim.counting() as found, sim.graph(graph):
        twins.optimizer.step()
    assert (found.captures, found.captured >= 1, found.launches) == (1, True, 0)
    for p, was in zip(twins.params, before, strict=True):
        assert torch.equal(p.detach().cpu(), was)
    for k in range(3):
        for (a, b), (p, q) in zip(grads, pairs, strict=True):
            p.grad, q.grad = a, b
        graph.replay()
        twins.step_eager()
        assert twins.differences() == [], f"replay {k}"
        # with grads elsewhere, and numbers of their own
        twins.step()
        assert twins.differences() == [], f"call {k}"


def test_a_step_that_is_not_ready_refuses_a_capture(sim: ModuleType) -> None:
    twins = SimTwins(PLAIN, ((4, 6),))
    for _ in range(2):
        twins.step()
    twins.set_grads()
    (p,), (q,) = twins.params, twins.eager_params
    grad = q.grad
    assert grad is not None
    p.grad = grad.t().contiguous().to("sim").t()
    graph = sim.CUDAGraph()
    with sim.graph(graph):
        sim.enqueue(lambda: None)
        with pytest.raises(LaunchError, match="Run it once before"):
            twins.optimizer.step()
    assert not sim.is_current_stream_capturing()
    twins.step_eager()
    twins.optimizer.step()
    assert twins.differences() == []


def test_a_joined_graph_may_outlive_the_compiled_step(sim: ModuleType) -> None:
    params = [torch.nn.Parameter(torch.ones(5, device="sim"))]
    optimizer = fuseopt.compile(torch.optim.SGD(params, lr=0.5))
    params[0].grad = torch.ones(5, device="sim")
    for _ in range(2):
        optimizer.step()
    graph = sim.CUDAGraph()
    with sim.graph(graph):
        optimizer.step()
    del optimizer
    torch._dynamo.reset()
    gc.collect()
    graph.replay()
    graph.replay()
    assert params[0].tolist() == [-1.0] * 5


def test_captures_of_the_users_follow_each_other(sim: ModuleType) -> None:
    """A capture, a replay, and a capture again, with no call outside between them; two
    steps in one capture.
    """
    twins = SimTwins(SGD)
    for _ in range(3):
        twins.step()
    twins.set_grads(stay=True)
    for steps in (1, 1, 2):
        graph = sim.CUDAGraph()
        with sim.graph(graph):
            for _ in range(steps):
                twins.optimizer.step()
        for _ in range(2):
            graph.replay()
            for _ in range(steps):
                twins.step_eager()
            assert twins.differences() == []
        if steps == 1:
            continue
        twins.step()
        assert twins.differences() == []


@pytest.mark.slow
def test_more_steps_in_captures_than_there_is_memory_for_are_refused(
    sim: ModuleType,
) -> None:
    """No pinned memory may be made in a capture. After a call outside there is more."""
    twins = SimTwins(SGD)
    for _ in range(3):
        twins.step()
    twins.set_grads(stay=True)
    refused: list[bool] = []
    for _ in range(3):
        graph = sim.CUDAGraph()
        said = ""
        try:
            with sim.graph(graph):
                for _ in range(9):
                    twins.optimizer.step()
        except LaunchError as error:
            said = str(error)
        if not said:
            break
        refused.append("Run the step once outside of a capture" in said)
        twins.step(stay=True)
        assert twins.differences() == []
    assert refused == [True, True]
    graph.replay()
    for _ in range(9):
        twins.step_eager()
    assert twins.differences() == []


@pytest.mark.slow
def test_a_number_of_the_host_meets_a_reduction(sim: ModuleType) -> None:
    """Adafactor's rate follows a counter on the CPU and the norm of its update."""
    twins = SimTwins(
        lambda p: torch.optim.Adafactor(p, foreach=False), [(6, 4), (5,)], whole=True
    )
    for _ in range(3):
        twins.step()
    assert twins.differences() == []
    assert (twins.report.fallback, twins.report.cudagraph) == ("", "captured")


@pytest.mark.parametrize("options", [{}, {"t0": 2}])
def test_a_number_of_the_device_passes_through_the_cpu(
    sim: ModuleType, options: dict[str, Any]
) -> None:
    """ASGD's loop makes CPU tensors of its counters, and copies them to the device."""
    twins = SimTwins(
        lambda p: torch.optim.ASGD(p, foreach=False, **options),
        [(6, 4), (5,)],
        check=True,
    )
    for _ in range(5):
        twins.step()
        assert twins.differences() == []
    twins.set_grads()
    sim.synchronize()
    with sim.counting() as calls:
        twins.optimizer.step()
    assert twins.report.fallback == ""
    assert (calls.syncs, calls.d2h) == (0, 0)
