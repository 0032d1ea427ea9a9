"""Dynamo does not time the guards of steps that are traced for fuseopt."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics


def _latencies(run: Callable[[], Any]) -> list[int | None]:
    """Microseconds that guards take, of each frame that Dynamo compiles."""
    clear_compilation_metrics()
    run()
    return [metrics.guard_latency_us for metrics in get_compilation_metrics()]


def _step() -> Callable[[], Any]:
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    for p in params:
        p.grad = torch.ones(3)
    return torch.compile(torch.optim.SGD(params, lr=0.1).step, backend="fuseopt")


def test_guards_of_a_step_are_not_timed() -> None:
    found = _latencies(_step())
    assert found
    assert not any(found)


def test_guards_of_other_functions_are_timed() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    _step()()  # by now fuseopt has told Dynamo all that it must know
    compiled = torch.compile(function, backend="eager")
    found = _latencies(lambda: compiled(torch.ones(3)))
    assert [bool(x) for x in found] == [True]


def test_guards_of_a_step_are_timed_for_who_reads_the_logs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guards = torch._dynamo.guards  # type: ignore[attr-defined]
    with caplog.at_level(logging.DEBUG, logger=guards.guards_log.name):
        found = _latencies(_step())
    assert any(found)
