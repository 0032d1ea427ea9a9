"""Numbers of bfloat16 on the main path: roots, and two numbers widened at a time.

A root of a bfloat16 that is rounded to bfloat16 again needs no exact root in between.
Halfway between two bfloat16 lies a number of 9 bits, whose square has a 1 in a place
that no bfloat16 has. So a root is farther from it than 2**-18 of its size, and the
estimate of PTX is off by 2**-22 at most.

To widen a bfloat16 is a shift, or a mask for the upper half of a register. ptxas takes
three instructions for the two halves of a register where each is widened alone.
"""

from __future__ import annotations

from ...ir.graph import Variant
from .uses import Uses, all_cast, readers, widens

WIDE = """\
@triton.jit
def wide(x):
    # bfloat16 in float32, for the two halves of a register
    tl.static_assert(x.dtype == tl.bfloat16)
    text: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
    return tl.inline_asm_elementwise(text, "=f,=f,r", [x], tl.float32, True, 2)
"""


def replacements(v: Variant) -> dict[int, str]:
    """Return the text of the instructions of element code that read bfloat16 otherwise.

    The text has instructions of PTX, and relies on the error that PTX admits for roots.
    """
    uses, lane, instead = readers(v), set(v.lane_code), {}
    for i in v.code:
        instr = v.instrs[i]
        if i in lane or not instr.args:
            continue
        text = f"x{instr.args[0]}"
        if instr.op in ("sqrt", "vsqrt") and instr.dtype == "f32":
            if all_cast(v, i, uses, "bf16") and widens(v, instr.args[0]):
                instead[i] = f"tl.sqrt({text})"
        elif widens(v, i) and instr.args[0] not in lane:
            if not all(_in_bfloat16(v, u, uses) for u in uses[i]):
                instead[i] = f"wide({text})"
    return instead


def _in_bfloat16(v: Variant, i: int | None, uses: Uses) -> bool:
    """Does LLVM compute an instruction in bfloat16, two elements at a time?

    It does so if nothing reads the sum or the product of two such numbers in float32.
    """
    if i is None or v.instrs[i].op not in ("add", "sub", "mul"):
        return False
    narrow = all_cast(v, i, uses, "bf16")
    return narrow and all(widens(v, a) for a in v.instrs[i].args)
