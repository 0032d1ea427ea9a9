"""Microseconds of a call over small parameters, beside a backend that does nothing."""

from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.host import ROUNDS, HostRun
from bench.plan import HostCase


def test_host(benchmark: BenchmarkFixture, bench: Bench, case: HostCase) -> None:
    run = HostRun(case.params, bench.device)
    benchmark.group = case.name
    benchmark.pedantic(
        lambda: run.turns.take(run.own),
        setup=lambda: run.turns.round(but=run.own),
        rounds=ROUNDS,
    )
    bench.put(case, run.result())
