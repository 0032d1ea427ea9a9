"""Seconds of whole training steps, and the optimizer's share of them."""

from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.plan import TrainingCase
from bench.training import ROUNDS, TrainingRun


def test_training(
    benchmark: BenchmarkFixture, bench: Bench, case: TrainingCase
) -> None:
    run = TrainingRun(case.model, case.whole, bench.device, bench.cap)
    turns = iter(range(ROUNDS))
    benchmark.group = case.name
    # one round holds a step of each way; each keeps seconds of its own
    benchmark.pedantic(lambda: run.round(next(turns)), rounds=ROUNDS)
    bench.put(case, run.result())
