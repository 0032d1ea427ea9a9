"""Choose divisions that a loop makes by multiplying, where the divider is its limit.

A processor has one divider, which takes one vector after the other. Multiplications and
sums start twice in each cycle. So a loop of several quotients and roots waits for the
divider alone. Where elements share the number by which they are divided, products have
the bits of the quotient: see include/quotients.h.
"""

from __future__ import annotations

from ...ir.graph import Variant
from ..optable import LIBRARY, NARROW

#: Cycles of the divider, for a vector.
_BUSY = {"div": 10, "sqrt": 12}
#: Instructions of a vector, of which two start in a cycle; others are one.
_WORK = {"div": 3, "sqrt": 3, "lookup": 26, "search": 45}
_FREE = frozenset({"load", "const", "scalar", "tail", "spread", "index"})
#: Those of a library's function; those that read, or round and write, 16-bit floats;
#: those of a fold.
_LIBRARY, _READ, _WRITE, _FOLD = 12, 2, 8, 4
#: Those of a division that is made by multiplying, with the test of its range, and of
#: the loop's second half.
_INSTEAD = 16


def divisions(v: Variant) -> tuple[int, ...]:
    """Return the divisions of element code that a loop makes by multiplying.

    Each must lower the limit, which is the divider or all else. AdamW's does not.
    """
    chosen = []
    elements = set(v.code)
    # two instructions in a cycle
    busy = 2 * sum(_BUSY.get(v.instrs[x].op, 0) for x in v.code)
    work = _work(v)
    for x in v.code:
        instr = v.instrs[x]
        if instr.op != "div" or instr.dtype != "f32" or instr.args[1] in elements:
            continue
        less, more = busy - 2 * _BUSY["div"], work + _INSTEAD - _WORK["div"]
        if max(less, more) < max(busy, work):
            chosen.append(x)
            busy, work = less, more
    return tuple(chosen)


def _work(v: Variant) -> int:
    """Return the number of instructions of a vector of elements."""
    total = _FOLD * len(v.folds)
    for x in v.code:
        instr = v.instrs[x]
        if (instr.op, instr.dtype) in LIBRARY:
            total += _LIBRARY
        elif instr.op not in _FREE:
            total += _WORK.get(instr.op, 1)
    for slot in v.slots:
        if slot.domain == "element" and slot.dtype in NARROW:
            total += _READ * slot.read + _WRITE * slot.write
    return total
