"""Random steps that move numbers about: the bits, the state and the types of eager."""

from __future__ import annotations

from pathlib import Path

from tests.numerics.fuzz_stores import random_stores
from tests.numerics.test_fuzz_bodies import judge
from tests.numerics.test_fuzz_programs import TIMES, fuzz

TURNS = 5
#: 1,000 of them in `make fuzz`.
STEPS = 6 if TIMES == 1 else 1000 // TIMES


@fuzz(STEPS)
def test_stores(tmp_path: Path, seed: int) -> None:
    judge(random_stores(seed), tmp_path, TURNS)
