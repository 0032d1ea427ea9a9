"""Differences between two calls: the result type of every comparison."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

log = logging.getLogger("fuseopt.inputs")


class Change(enum.Enum):
    """The kind of a difference between two calls, found by one record.

    | change | meaning | what follows |
    |---|---|---|
    | SAME | the same objects | the step launches |
    | NUMBERS | numbers replaced numbers | fuseopt evaluates formulas and writes rows |
    | STRUCTURE | anything else | fuseopt rehearses, traces or compiles the step again |

    Addresses, the presence of gradients and changed layouts are not here. The records
    of lanes (`lane_matcher.py`) and of tensors (`runtime/guards/tensors.py`) hold them.
    """

    SAME = 0
    NUMBERS = 1
    STRUCTURE = 2


class MovedNumber(NamedTuple):
    """A new number: its cell in the record that found it, its dict and key, and it."""

    cell: int
    container: Any
    key: Any
    number: Any


class Difference(NamedTuple):
    """The result of a comparison.

    `reason`: the changed part, in words, for STRUCTURE. `moved`: for NUMBERS.
    """

    change: Change
    reason: str = ""
    moved: Sequence[MovedNumber] = ()

    def log(self, what: str) -> None:
        """Log the reason why `what` cannot continue as in the last call."""
        log.info("%s: %s", what, self.reason)


SAME = Difference(Change.SAME)
