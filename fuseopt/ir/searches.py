"""Words with which kernels search the steps of a table: one word for each search.

The leading bits of a number choose the word; there are so many of them that no two
steps of a part have the same. A word has the code of the numbers before the step, above
`shift` bits. Below are what the other bits of the step lack to 1 << shift. So the sum
of a word and the other bits of a number has the number's code above `shift` bits.

Negative numbers have words by their size, and the bits of their rest inverted.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import NamedTuple

from .tables import TABLES


class Words(NamedTuple):
    """The words of a table. `shift`: the bits of a float32 that do not choose a word;
    `first`, `last`: the least and the largest of the leading bits that do. `above`,
    `below`: by part, the place of the words of positive and of negative numbers; -1
    where a part has no negative steps.
    """

    shift: int
    first: int
    last: int
    entries: tuple[int, ...]
    above: tuple[int, ...]
    below: tuple[int, ...]


def _bits(x: float) -> int:
    return int(struct.unpack("I", struct.pack("f", abs(x)))[0])


def _shift(halves: Sequence[Sequence[int]]) -> int:
    """The most bits that a word may leave to compare."""
    for shift in range(22, -1, -1):
        if all(len({b >> shift for b in half}) == len(half) for half in halves):
            return shift
    raise ValueError("two steps of a table are equal")


def _half(
    steps: Sequence[int], base: int, falls: bool, words: range, shift: int
) -> list[int]:
    """The words of numbers of one sign, by their leading bits. `steps`: the bits of the
    steps' sizes; `base`: the code of a number smaller than all of them.
    """
    at = {b >> shift: b & (1 << shift) - 1 for b in steps}
    code, found = base, []
    for word in words:
        if word not in at:
            found.append(code << shift)
        elif falls:
            # a number that has the size of the step is above it: `at` inverted bits
            # or more, as those of a size up to that
            code -= 1
            found.append((code << shift) + at[word] + 1)
        else:
            found.append((code << shift) + (1 << shift) - at[word])
            code += 1
    return found


@functools.cache
def words_of(number: int) -> Words:
    """The words of a table."""
    this = TABLES[number]
    upper = [[_bits(x) for x in part if x > 0] for part in this.steps]
    lower = [[_bits(x) for x in part if x < 0] for part in this.steps]
    halves = [x for x in (*upper, *lower) if x]
    shift = _shift(halves)
    # a word before all steps, and one behind them
    first = (min(map(min, halves)) >> shift) - 1
    last = (max(map(max, halves)) >> shift) + 1
    words = range(first, last + 1)
    entries: list[int] = []
    place, minus = [], []
    for above, under in zip(upper, lower, strict=True):
        place.append(len(entries))
        entries += _half(above, len(under), False, words, shift)
        minus.append(len(entries) if under else -1)
        entries += _half(under, len(under), True, words, shift) if under else []
    return Words(shift, first, last, tuple(entries), tuple(place), tuple(minus))
