"""Python that a call runs on a device: none of it for each tensor or lane."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

import fuseopt
from tests.frames import entered, lines
from tests.simulated.twins import SimTwins

#: How to make each, and the functions of Python that a call enters at most.
STEPS: dict[str, tuple[Callable[[list[Any]], torch.optim.Optimizer], int]] = {
    # its counters lie on the CPU: a launch there, and one on the device
    "AdamW": (lambda p: torch.optim.AdamW(p, foreach=True), 43),
    "capturable": (
        lambda p: torch.optim.AdamW(p, foreach=True, capturable=True),
        43,
    ),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        43,
    ),
}


def ready(name: str, n: int, graph: Any) -> SimTwins:
    """Twins with so many parameters, in the middle of their steps."""
    twins = SimTwins(STEPS[name][0], [(8,)] * n, cudagraphs=graph)
    for k in range(9):
        twins.step(stay=k in (2, 3, 5))
    twins.set_grads()
    return twins


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["auto", True], ids=["launched", "replayed"])
@pytest.mark.parametrize("name", STEPS)
def test_no_line_runs_for_each_tensor(sim: ModuleType, name: str, graph: Any) -> None:
    """All gradients have moved."""
    counted = []
    for n in (12, 40):
        twins = ready(name, n, graph)
        counted.append(lines(twins.optimizer.step))
        twins.step_eager()
        assert twins.differences() == []
        torch._dynamo.reset()
    few, many = counted
    more = {place: many[place] - few[place] for place in many}
    assert {place: n for place, n in more.items() if n >= 14} == {}
    assert many.total() - few.total() < 28


#: Lines of Python at 148 tensors, all of whose gradients moved, and those of
#: `fuseopt/runtime` among them; without the simulated device's.
MOST = {"AdamW": (206, 107), "capturable": (205, 102), "momentum": (188, 102)}


@pytest.mark.parametrize("name", STEPS)
def test_lines_of_a_call_are_few(sim: ModuleType, name: str) -> None:
    """No kernel is counted: "sim" interprets it when somebody waits."""
    twins = ready(name, 148, "auto")
    counted = lines(twins.optimizer.step)
    own = {
        file: sum(n for (f, _), n in counted.items() if f == file)
        for file, _ in counted
        if "/tests/simulated/" not in file and "/torch/accelerator/" not in file
    }
    runtime = sum(n for f, n in own.items() if "/fuseopt/runtime/" in f)
    assert sum(own.values()) <= MOST[name][0]
    assert runtime <= MOST[name][1]
    twins.step_eager()
    assert twins.differences() == []


@pytest.mark.parametrize("name", STEPS)
def test_few_functions_are_entered(sim: ModuleType, name: str) -> None:
    twins = ready(name, 12, "auto")
    own = [
        code
        for code in entered(twins.optimizer.step)
        if "/tests/simulated/" not in code.co_filename
    ]
    assert len(own) <= STEPS[name][1]


@pytest.mark.parametrize("name", STEPS)
def test_versions_are_counted_up_as_in_eager(sim: ModuleType, name: str) -> None:
    """In C, as one call: autograd sees what was written, and how often."""

    def versions(optimizer: Any, params: list[Any]) -> list[int]:
        state = [optimizer.state[p] for p in params]
        every = [*params, *(v for s in state for v in s.values())]
        return [t._version for t in every if isinstance(t, torch.Tensor)]

    twins = ready(name, 5, "auto")
    before = versions(twins.optimizer, twins.params)
    twins.optimizer.step()
    after = versions(twins.optimizer, twins.params)
    assert [b - a for a, b in zip(before, after, strict=True)] == [1] * len(after)
    assert not fuseopt.reports()[-1].fallback
