"""Seconds of a first AdamW step, each in a process of its own."""

import statistics
from pathlib import Path
from typing import Any

from pytest_benchmark.fixture import BenchmarkFixture

from bench.conftest import Bench
from bench.first_step import TooLong, process
from bench.models import model_shapes
from bench.plan import FirstCase


def test_first_step(
    benchmark: BenchmarkFixture, bench: Bench, case: FirstCase, tmp_path: Path
) -> None:
    rounds: dict[str, list[dict[str, Any]]] = {"cold": [], "warm": []}

    def step(cache: str, folder: Path) -> None:
        with process(case.way, case.model, folder, bench.device) as ready:
            rounds[cache].append(ready.first_step(bench.cap))

    benchmark.group = case.name
    tensors = len(model_shapes(case.model))
    found: dict[str, Any] = {"tensors": tensors, "rounds": bench.first_rounds}
    try:
        benchmark.pedantic(step, args=("cold", tmp_path / "0"), rounds=1)
        for turn in range(1, bench.first_rounds):
            step("cold", tmp_path / str(turn))
        for turn in range(bench.first_rounds if case.small else 0):
            step("warm", tmp_path / str(turn))
    except TooLong as error:
        found |= {cache: {"skipped": str(error)} for cache in rounds}
    found |= {cache: middle(taken) for cache, taken in rounds.items() if taken}
    bench.put(case, found)


def middle(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure; counts are the same in all rounds."""
    found = dict(rounds[0])
    for key, value in rounds[0].items():
        if isinstance(value, float):
            found[key] = statistics.median(taken[key] for taken in rounds)
        elif isinstance(value, dict):
            found[key] = middle([taken[key] for taken in rounds])
    return found
