"""Seconds of a step, beside whoever else can do it. See docs/benchmarks.md."""

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.contenders import Unavailable
from bench.measure import StepRun
from bench.plan import StepCase


def test_step(benchmark: BenchmarkFixture, bench: Bench, case: StepCase) -> None:
    try:
        run = StepRun(case, bench.device, bench.cap, caches=bench.caches)
    except Unavailable as error:
        bench.put(case, {"skipped": str(error)})
        pytest.skip(str(error))
    benchmark.group = case.name
    benchmark.pedantic(run.take_own, setup=run.others, rounds=run.rounds)
    bench.put(case, run.result())
