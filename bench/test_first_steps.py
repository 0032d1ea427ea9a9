"""Seconds of a first AdamW step, each in a process of its own, cold and warm."""

import statistics
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.first_step import TooLong, process
from bench.plan import FirstCase


def test_first_step(
    benchmark: BenchmarkFixture, bench: Bench, case: FirstCase, tmp_path: Path
) -> None:
    rounds: list[dict[str, Any]] = []
    try:
        if case.cache == "warm":
            with process(case.way, case.params, tmp_path, bench.device) as filling:
                filling.first_step(bench.cap)
        for turn in range(bench.first_rounds):
            folder = tmp_path / str(turn) if case.cache == "cold" else tmp_path
            with process(case.way, case.params, folder, bench.device) as ready:
                figures: dict[str, Any] = {}
                step = ready.first_step
                if turn == 0:
                    benchmark.group = case.name
                    benchmark.pedantic(
                        lambda step=step, into=figures: into.update(step(bench.cap)),
                        rounds=1,
                    )
                else:
                    figures.update(step(bench.cap))
                rounds.append(figures)
    except TooLong as error:
        bench.put(case, {"tensors": case.params, "skipped": str(error)})
        return
    bench.put(case, {"tensors": case.params, "rounds": len(rounds), **middle(rounds)})


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure; counts are the same in all rounds."""
    found = dict(rounds[0])
    for key, value in rounds[0].items():
        if isinstance(value, float):
            found[key] = statistics.median(taken[key] for taken in rounds)
        elif isinstance(value, dict):
            found[key] = middle([taken[key] for taken in rounds])
    return found
