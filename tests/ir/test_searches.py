"""Words of a search: the code of each number near a step, of any sign and kind."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fuseopt.ir.searches import words_of
from fuseopt.ir.tables import TABLES


def numbers(steps: tuple[float, ...]) -> np.ndarray:
    """All steps with their neighbours, those of opposite sign, and what is special."""
    at = np.array(steps, dtype=np.float32)
    near = [at, np.nextafter(at, np.float32(9)), np.nextafter(at, np.float32(-9))]
    special = [0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf, math.nan, 3e38, -3e38]
    drawn = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    scaled = drawn * np.float32(10) ** np.arange(-45, 38, 4).repeat(1000)[: len(drawn)]
    return np.concatenate([*near, *(-x for x in near), special, drawn, scaled]).astype(
        np.float32
    )


def searched(number: int, part: int, x: np.ndarray) -> np.ndarray:
    """As the kernels search: one word, and what the number's rest adds to it."""
    words = words_of(number)
    bits = x.view(np.int32)
    falls = (bits >> 31) if words.below[part] >= 0 else np.zeros_like(bits)
    kept = np.clip((bits & 0x7FFFFFFF) >> words.shift, words.first, words.last)
    place = np.where(falls < 0, words.below[part], words.above[part])
    word = np.array(words.entries, dtype=np.int32)[kept - words.first + place]
    code = (word + ((bits ^ falls) & (1 << words.shift) - 1)) >> words.shift
    nothing = np.isnan(x) | ((x < 0) & (words.below[part] < 0))
    return np.where(nothing, 0, code)


@pytest.mark.parametrize(
    ("number", "part"),
    [(n, part) for n, t in enumerate(TABLES) for part in range(len(t.steps))],
)
def test_code_is_the_number_of_steps_that_are_at_most_x(number: int, part: int) -> None:
    steps = np.array(TABLES[number].steps[part], dtype=np.float32)
    x = numbers(TABLES[number].steps[part])
    expected = np.searchsorted(steps, x, side="right")
    expected[np.isnan(x)] = 0
    found = searched(number, part, x)
    wrong = np.flatnonzero(found != expected)
    assert not len(wrong), [(x[k], found[k], expected[k]) for k in wrong[:5]]
