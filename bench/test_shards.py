"""Seconds of a step and a clip of DTensors, in one process of a group."""

from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.plan import ShardCase
from bench.shards import ShardRun, group


def test_shards(benchmark: BenchmarkFixture, bench: Bench, case: ShardCase) -> None:
    benchmark.group = case.name
    with group():
        run = ShardRun(case.params, case.without)
        benchmark.pedantic(run.take_own, setup=run.others, rounds=run.rounds)
        bench.put(case, run.result())
