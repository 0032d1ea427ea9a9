"""Random steps that move numbers about: the bits, the state and the types of eager."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from tests.numerics.fuzz_stores import random_stores
from tests.numerics.test_fuzz_bodies import judge
from tests.numerics.test_fuzz_programs import fuzz

TURNS = 5
#: `make fuzz` judges 1,000 with tests/tools/fuzz.py.
STEPS = 6


@fuzz(STEPS)
def test_stores(tmp_path: Path, seed: int) -> None:
    judge(random_stores(seed), tmp_path, TURNS)


def judge_seed(seed: int, folder: Path) -> dict[str, Any]:
    """Judge a seed for tests/tools/fuzz.py. Raises AssertionError with what differs."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    judge(random_stores(seed), folder, TURNS)
    return {"ways": {"stores": "alike"}}
