"""Microseconds of a call that are the backend's own, at 300 small parameters.

A backend that does nothing pays for Dynamo's guards and the call, too. The difference
to it, taken in turns, is what the backend itself costs.
"""

import statistics
from collections.abc import Callable

import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.interleave import seconds_of
from bench.shapes import make_params, small_shapes

PARAMS = 300
ROUNDS = 50
CALLS = 40
WARM_UP = 3


def test_call_of_300_small_parameters(
    benchmark: BenchmarkFixture, backend: str
) -> None:
    compiled = calls_of(compiled_step(backend))
    nothing = calls_of(compiled_step(no_op))
    floor: list[float] = []

    benchmark.group = f"{CALLS} calls, {PARAMS} small parameters"
    benchmark.pedantic(
        compiled, setup=lambda: floor.append(seconds_of(nothing)), rounds=ROUNDS
    )

    benchmark.extra_info["backend"] = backend
    if benchmark.stats is None:  # --benchmark-disable: run, but nothing measured
        return
    own, no_op_own = benchmark.stats.stats.median, statistics.median(floor)
    benchmark.extra_info["microseconds_per_call"] = 1e6 * own / CALLS
    benchmark.extra_info["no_op_microseconds_per_call"] = 1e6 * no_op_own / CALLS
    benchmark.extra_info["microseconds_above_no_op"] = 1e6 * (own - no_op_own) / CALLS


def no_op(
    graph: torch.fx.GraphModule, inputs: list[torch.Tensor]
) -> Callable[..., tuple[()]]:
    """Compile any step, whose graph returns nothing, to nothing."""
    return lambda *args: ()


def compiled_step(backend: str | Callable[..., object]) -> Callable[[], object]:
    """Return the compiled step of an AdamW of its own, already compiled and warm."""
    optimizer = torch.optim.AdamW(make_params(small_shapes(PARAMS)))
    step = torch.compile(optimizer.step, backend=backend)
    for _ in range(WARM_UP):
        step()
    return step


def calls_of(step: Callable[[], object]) -> Callable[[], None]:
    """Return a function that steps CALLS times: one call is too short for a clock."""

    def calls() -> None:
        for _ in range(CALLS):
            step()

    return calls
