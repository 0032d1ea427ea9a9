"""Seconds of a first AdamW step, by number of parameters, cold and warm.

The benchmark's own figure is the whole first step. Its extra_info splits it: Dynamo,
the backend, and of the backend's the build of the kernel; medians over the rounds.
"""

import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.first_step import Process, process

ROUNDS = 3


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("params", [50, 300, 1000])
def test_first_step(
    benchmark: BenchmarkFixture,
    tmp_path: Path,
    backend: str,
    params: int,
    cache: str,
) -> None:
    benchmark.group = f"first AdamW step, {params} parameters"
    rounds: list[dict[str, float]] = []
    with ExitStack() as started:

        def get_ready() -> tuple[tuple[Process], dict[str, object]]:
            folder = tmp_path if cache == "warm" else tempfile.mkdtemp(dir=tmp_path)
            ready = process(backend, params, Path(folder))
            return (started.enter_context(ready),), {}

        if cache == "warm":
            (filling,), _ = get_ready()
            filling.first_step()
        benchmark.pedantic(
            lambda ready: rounds.append(ready.first_step()),
            setup=get_ready,
            rounds=ROUNDS,
        )

    benchmark.extra_info["backend"] = backend
    for part in rounds[0]:
        benchmark.extra_info[part] = statistics.median(took[part] for took in rounds)
