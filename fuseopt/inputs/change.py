"""How a call differs from the last one: the words in which every comparison answers."""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

log = logging.getLogger("fuseopt.inputs")


class Change(enum.Enum):
    """What differs between two calls, by one record.

    | change | meaning | what follows |
    |---|---|---|
    | SAME | the same objects | the step launches |
    | NUMBERS | numbers replaced numbers | formulas are evaluated, rows are written |
    | STRUCTURE | anything else | the step is rehearsed, traced or compiled again |

    Where tensors lie, which gradients there are and what is laid out otherwise is in
    the records of lanes (`look.py`) and of tensors (`runtime/guards/tensors.py`).
    """

    SAME = 0
    NUMBERS = 1
    STRUCTURE = 2


class Difference(NamedTuple):
    """The result of a comparison. `reason`: what changed, in words, for STRUCTURE.
    `moved`: for NUMBERS, the index of each number in the record, and its new value.
    """

    change: Change
    reason: str = ""
    moved: Sequence[tuple[int, Any]] = ()

    def log(self, what: str) -> None:
        """Log the reason why `what` cannot go on as in the last call."""
        log.info("%s: %s", what, self.reason)


SAME = Difference(Change.SAME)
