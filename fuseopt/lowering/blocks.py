"""The bodies of what works on blocks of elements, and on tables; see ir/blocks.py and
ir/tables.py.
"""

from __future__ import annotations

from ..ir.blocks import SIZED, SIZES
from ..ir.graph import Body, Instr
from ..ir.tables import TABLES

#: The types of the operands of what uses a table, and of its result.
TABLED = {"lookup": (("i32", "i32"), "f32"), "search": (("f32", "i32"), "i32")}


def lower_block(op: str, dtypes: tuple[str, ...], attr: int) -> Body | None:
    """The body of `op`; None where it has no meaning. `attr`: the size of blocks, or
    the number of a table.
    """
    if op in SIZED:
        known = attr in SIZES and (op in ("spread", "first") or dtypes == ("f32",))
        result = dtypes[0]
    else:
        operands, result = TABLED[op]
        known = 0 <= attr < len(TABLES) and dtypes == operands
    if not known:
        return None
    loads = [Instr("load", (), dtype, k) for k, dtype in enumerate(dtypes)]
    places = tuple(range(len(loads)))
    instrs = (*loads, Instr(op, places, result, attr))
    return Body(op, dtypes, 0, instrs, ((len(loads), result),))
