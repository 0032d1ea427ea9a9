"""A step in a graph of the user's, whose numbers `fuseopt.refresh` keeps live."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import COMPILED
from fuseopt.errors import LaunchError, UnsupportedInput
from fuseopt.runtime.commit import Pending
from tests.simulated.twins import SimTwins


class Normed(torch.optim.Optimizer):
    """Divides each gradient by its norm."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / (p.grad.norm() + 1.0), alpha=group["lr"])


Make = Callable[[list[Any]], torch.optim.Optimizer]
SHAPES = [(7, 3), (5,), (), (4, 4)] * 5
STEPS: dict[str, Make] = {
    # its counters lie in the CPU's memory
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=True),
    "capturable": lambda p: torch.optim.AdamW(p, foreach=True, capturable=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    # several launches, and memory between them
    "normed": lambda p: Normed(p),
}


def captured(name: str, sim: ModuleType, n: int = 20, **options: Any) -> Any:
    """Twins after three steps, and the graph of one more step."""
    whole = name == "normed"
    twins = SimTwins(STEPS[name], SHAPES[:n], whole=whole, **options)
    for _ in range(3):
        twins.step(stay=True)
    fuseopt.refresh(twins.optimizer)
    graph = sim.CUDAGraph()
    with sim.graph(graph):
        twins.optimizer.step()
    assert twins.differences() == []
    return twins, graph


def again(twins: SimTwins, sim: ModuleType) -> Any:
    """Another graph of a step."""
    fuseopt.refresh(twins.optimizer, anew=True)
    graph = sim.CUDAGraph()
    with sim.graph(graph):
        twins.optimizer.step()
    return graph


def replayed(twins: SimTwins, graph: Any, **numbers: Any) -> None:
    """One step of both, with other numbers."""
    twins.set_grads(stay=True)
    twins.set(**numbers)
    twins.step_eager()
    fuseopt.refresh(twins.optimizer)
    graph.replay()


@pytest.mark.slow
@pytest.mark.parametrize("n", [20, 4])
@pytest.mark.parametrize("name", STEPS)
def test_numbers_are_live_in_a_replay(sim: ModuleType, name: str, n: int) -> None:
    twins, graph = captured(name, sim, n)
    for k in range(4):
        replayed(twins, graph, lr=0.1 / (k + 1))
        assert twins.differences() == [], f"replay {k}"
    # calls outside of the graph, between its replays
    for k in range(2):
        twins.step(stay=True)
        assert twins.differences() == [], f"call {k}"
        replayed(twins, graph, lr=0.01)
        assert twins.differences() == [], f"replay after call {k}"


@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_a_refresh_launches_nothing_and_waits_for_nothing(
    sim: ModuleType, name: str
) -> None:
    twins, graph = captured(name, sim)
    replayed(twins, graph)
    twins.set(lr=0.5)
    with sim.counting() as found:
        fuseopt.refresh(twins.optimizer)
    assert (found.launches, found.replays, found.syncs, found.h2d_blocking) == (0,) * 4
    assert found.h2d == 1
    # no more than the numbers
    assert found.h2d_bytes <= 8 * (len(SHAPES) * 4 + 32)
    with sim.counting() as found:
        graph.replay()
    assert (found.replays, found.launches) == (1, 0)


def test_a_replay_without_a_refresh_has_the_last_numbers(sim: ModuleType) -> None:
    twins, graph = captured("momentum", sim)
    replayed(twins, graph, lr=0.3)
    twins.step_eager()
    graph.replay()
    assert twins.differences() == []


def test_tensors_that_moved_are_refused(sim: ModuleType) -> None:
    twins, graph = captured("AdamW", sim)
    replayed(twins, graph)
    grads = [p.grad for p in twins.params]
    before = [p.detach().cpu() for p in twins.params]
    counters = [float(s["step"]) for s in twins.optimizer.state.values()]
    twins.params[3].grad = grads[3].clone()
    with pytest.raises(LaunchError, match="other parameters, gradients or state"):
        fuseopt.refresh(twins.optimizer)
    twins.params[3].grad = None
    with pytest.raises(LaunchError):
        fuseopt.refresh(twins.optimizer)
    for p, was in zip(twins.params, before, strict=True):
        assert torch.equal(p.detach().cpu(), was)
    assert counters == [float(s["step"]) for s in twins.optimizer.state.values()]
    twins.params[3].grad = grads[3]
    graph = again(twins, sim)
    replayed(twins, graph, lr=0.2)
    assert twins.differences() == []


def test_an_error_of_the_copy_leaves_counters(sim: ModuleType) -> None:
    """The CPU's part of a step is put back where its numbers cannot be sent."""
    twins, graph = captured("AdamW", sim)
    replayed(twins, graph)
    counters = [float(s["step"]) for s in twins.optimizer.state.values()]
    (step,) = _steps(twins)
    arena = step.program.bound.tables.arenas[0]
    push = arena.push

    def fails() -> None:
        raise KeyboardInterrupt

    arena.push = fails
    with pytest.raises(KeyboardInterrupt):
        fuseopt.refresh(twins.optimizer)
    arena.push = push
    assert counters == [float(s["step"]) for s in twins.optimizer.state.values()]
    # it may have been compiled anew
    with pytest.raises(LaunchError, match="was compiled anew"):
        fuseopt.refresh(twins.optimizer)
    graph = again(twins, sim)
    replayed(twins, graph)
    assert twins.differences() == []


def _steps(twins: SimTwins) -> list[Any]:
    isolated = getattr(twins.optimizer.step, COMPILED)
    return [s.program.step for s in isolated.leader.trace.steps]


def test_writes_of_python_are_refused_before_them() -> None:
    pending, done = Pending(), []
    write = functools.partial(done.append, 1)
    with pending.without_launches():
        begun = pending.start()
        with pytest.raises(LaunchError, match="Python writes entries"):
            pending.finish(begun, [write])
    assert done == []
    pending.finish(pending.start(), [write])
    assert done == [1]


class Counts(torch.optim.Optimizer):
    """Keeps a Python number in its groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "n": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["n"] = group["n"] + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["n"])


def test_steps_that_cannot_be_refreshed_are_refused(sim: ModuleType) -> None:
    counts = SimTwins(Counts, SHAPES)
    for _ in range(3):
        counts.step()
    with pytest.raises(LaunchError, match="or returns tensors"):
        fuseopt.refresh(counts.optimizer)
    counts.step()
    assert counts.differences() == []
    on_cpu = SimTwins(STEPS["momentum"], SHAPES, device="cpu")
    for _ in range(3):
        on_cpu.step()
    with pytest.raises(LaunchError, match="kernels on a device"):
        fuseopt.refresh(on_cpu.optimizer)
    on_cpu.step()
    assert on_cpu.differences() == []
    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(UnsupportedInput, match="is not compiled"):
        fuseopt.refresh(plain)
