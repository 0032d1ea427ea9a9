"""Stand-ins: unique Python numbers in recorded calls for numbers without a value yet.

ATen's dispatcher takes floats and integers. A number of the host, or one that the step
computes, enters a recorded call as a unique Python number. The recorder finds its
origin by that value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from .device import Computed
from .host import Sym


class StandIns:
    """Stand-ins of one capture, and the number that each represents.

    They are far from 0 and 1, whose values torch may treat specially.
    """

    def __init__(self) -> None:
        self._by_value: dict[float, Sym | Computed] = {}
        self._by_number: dict[Sym | Computed, float] = {}
        self._literals: frozenset[float] = frozenset()
        self._floats: Iterator[float] = (
            0.7390851332151607 + 1.0e-9 * k for k in itertools.count(1)
        )
        self._integers: Iterator[int] = itertools.count(740_000_007, 13)

    def avoid(self, literals: Iterable[float]) -> None:
        """Exclude these numbers and their negatives from the stand-ins.

        The recorder would otherwise mistake a literal of the step for a stand-in. Call
        this before the first stand-in is made.
        """
        self._literals = frozenset(map(abs, literals))

    def of(self, number: Sym | Computed) -> float | int:
        """Return the stand-in of `number`, of the same Python type."""
        value = self._by_number.get(number)
        if value is None:
            candidates = self._floats if number.is_float else self._integers
            value = next(x for x in candidates if x not in self._literals)
            self._by_number[number] = value
            self._by_value[value] = number
        return value

    def find(self, value: Any) -> tuple[Sym | Computed, bool] | None:
        """Return the number that a stand-in represents, and whether it is negated.

        Returns None for any other value.
        """
        if not self._by_value or isinstance(value, bool):
            return None
        if not isinstance(value, (int, float)):
            return None
        number = self._by_value.get(value)
        if number is not None:
            return number, False
        number = self._by_value.get(-value)
        return None if number is None else (number, True)
