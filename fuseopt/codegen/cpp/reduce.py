"""C++ of a variant with reductions: its elements are folded as they are computed.

Element code computes a block of neighbours (walk.py), stores its results, and passes
the folded values in arrays. The folds of a whole lane (fold_lanes.py) or of rows and
columns (fold_rows.py) read these. Output code (output_code.py) has their results.
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
    """Does eager fold a whole lane in one thread, for any size?"""
    folds = (variant.instrs[i] for i in variant.folds)
    return any(serial(x.op, int(x.attr or 0)) for x in folds)


def least_to_share(variant: Variant) -> int:
    """Return the least number of threads that share a lane which eager folds in one.

    16-bit floats need much computation for each byte; wider ones keep memory busy.
    """
    dtypes = [slot.dtype for slot in variant.slots if slot.domain == "element"]
    return 2 if 2 * sum(d in NARROW for d in dtypes) > len(dtypes) else 3


def reduce(number: int, variant: Variant, writer: Function) -> list[str]:
    """Write folds, pieces and output code, which variant.Function does not write."""
    p = Folded(number, variant, writer)
    arrays = "".join(f", {kind}* __restrict__ y{k}" for k, kind in enumerate(p.kinds))
    lines = [*writer.row(p.slots, arrays), "", *output(p), ""]
    full = variant.reduction == "full"
    return [*lines, *(fold_lanes(p) if full else fold_rows(p))]
