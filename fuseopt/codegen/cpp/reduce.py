"""The C++ of a variant with reductions: its elements are folded as they are computed.

Element code computes a block of neighbours (walk.py), stores what it stores, and hands
what is folded to arrays, which the folds take: a whole lane's (fold_lanes.py), or those
of rows and columns (fold_rows.py). Output code (output_code.py) has their results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir.graph import Variant
from ..optable import NARROW
from .fold_lanes import fold_lanes
from .fold_rows import fold_rows
from .folded import Folded
from .folds import serial
from .output_code import output

if TYPE_CHECKING:
    from .variant import Function


def in_one_thread(variant: Variant) -> bool:
    """Does eager fold a whole lane in one thread, whatever its size?"""
    folds = (variant.instrs[i] for i in variant.folds)
    return any(serial(x.op, int(x.attr or 0)) for x in folds)


def least_to_share(variant: Variant) -> int:
    """How many threads are to share a lane that is folded in one: with 16-bit floats
    there is much to compute for each byte; wider ones keep memory busy.
    """
    dtypes = [slot.dtype for slot in variant.slots if slot.domain == "element"]
    return 2 if 2 * sum(d in NARROW for d in dtypes) > len(dtypes) else 3


def reduce(number: int, variant: Variant, writer: Function) -> list[str]:
    """Write what variant.Function does not: folds, pieces and output code."""
    p = Folded(number, variant, writer)
    arrays = "".join(f", {kind}* __restrict__ y{k}" for k, kind in enumerate(p.kinds))
    lines = [*writer.row(p.slots, arrays), "", *output(p), ""]
    full = variant.reduction == "full"
    return [*lines, *(fold_lanes(p) if full else fold_rows(p))]
