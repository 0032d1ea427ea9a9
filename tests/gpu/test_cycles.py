"""The model of bench/gpu/cycles.py agrees with itself. Nobody measured what it says."""

from __future__ import annotations

import dataclasses

import pytest

from bench.gpu.cycles import CARDS, COSTS, LAUNCH, programs_of, seconds, table
from bench.gpu.steps import LARGE, PROFILES
from fuseopt.codegen.triton.chunks import ROWS, SMALL

SIZES = [3, SMALL, SMALL + 1, 2048, 5000, 2_500_000, 40_000_000]


def test_programs_take_every_element() -> None:
    programs = programs_of(SIZES)
    assert sum(n for n, _ in programs) == sum(SIZES)
    # two small lanes share one
    assert programs[0] == (3 + SMALL, 1)
    assert len(programs_of([8] * (3 * ROWS + 1))) == 4


@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kind", COSTS)
def test_a_step_is_no_faster_than_its_bytes(card: str, kind: str) -> None:
    cost, rate = COSTS[kind], CARDS[card]
    time = seconds(SIZES, cost, rate)
    assert time >= LAUNCH + sum(SIZES) * cost.bytes / rate
    for worse in (
        dataclasses.replace(cost, bytes=cost.bytes * 2),
        dataclasses.replace(cost, instructions=cost.instructions * 4),
        dataclasses.replace(cost, programs=1),
        dataclasses.replace(cost, chunk=cost.chunk * 4),
    ):
        assert seconds(SIZES, worse, rate) > time


@pytest.mark.slow
def test_the_table_has_what_make_gpu_measures() -> None:
    rows = table().splitlines()[2:]
    assert {row.split("|")[1].strip() for row in rows} == {*PROFILES, *LARGE}
