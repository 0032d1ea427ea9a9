"""Seconds of the tail of a training step, in parts and as one."""

from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.plan import TailCase
from bench.tails import TailRun


def test_tail(benchmark: BenchmarkFixture, bench: Bench, case: TailCase) -> None:
    run = TailRun(case.model)
    benchmark.group = case.name
    benchmark.pedantic(run.take_own, setup=run.others, rounds=run.rounds)
    bench.put(case, run.result())
