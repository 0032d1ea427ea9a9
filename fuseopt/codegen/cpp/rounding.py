"""What is known of 16-bit floats before a kernel runs: which need no rounding.

In C++ a 16-bit float is computed in float32 and rounded after each instruction, as
eager rounds. Here: a variant -> the instructions whose numbers a 16-bit type holds as
they are, and those whose NaN survive a rounding that does not ask for NaN.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from ...ir.graph import FLOATS, Instr, Variant
from ..optable import NARROW

#: Their result is an operand, or one that needs no more digits than an operand.
_CHOICES = frozenset("neg abs max min where floor ceil trunc round cast".split())
#: A NaN that they give is the NaN of an operand, or the processor's own.
_ARITHMETIC = _CHOICES | frozenset("add sub mul div fma sqrt".split())
#: Bits as they are.
_MEMORY = ("load", "bitcast")


@dataclass(frozen=True)
class Known:
    """By instruction: `fits`, the 16-bit types that hold its numbers as they are;
    `calm`, whether its NaN, if any, have zeros in the half that bfloat16 lacks. Numbers
    of lane code are calm as element code reads them.
    """

    fits: tuple[frozenset[str], ...]
    calm: tuple[bool, ...]


def known(variant: Variant) -> Known:
    """What is known of each instruction of a variant."""
    fits: list[frozenset[str]] = []
    calm: list[bool] = []
    lanes = frozenset(variant.lane_code)
    for i, instr in enumerate(variant.instrs):
        args = instr.args[1:] if instr.op == "where" else instr.args
        fits.append(_fits(instr, [(variant.instrs[a], fits[a]) for a in args]))
        calm.append(
            i in lanes
            or instr.dtype not in FLOATS
            or instr.op == "const"
            or (instr.op in ("cast", *_MEMORY) and instr.dtype == "bf16")
            or (instr.op in _ARITHMETIC and all(calm[a] for a in args))
        )
    return Known(tuple(fits), tuple(calm))


def _fits(instr: Instr, args: list[tuple[Instr, frozenset[str]]]) -> frozenset[str]:
    if instr.dtype not in FLOATS:
        return frozenset()
    if instr.op == "const":
        return frozenset(d for d in NARROW if _holds(d, float(instr.attr or 0.0)))
    if instr.op in _MEMORY:
        return NARROW & {instr.dtype}
    if instr.op not in _CHOICES:
        return frozenset()
    fitting = frozenset(NARROW)
    for arg, fits in args:
        # 0 and 1
        fitting &= NARROW if arg.dtype == "b8" else fits
    if instr.op == "cast" and instr.dtype in NARROW and instr.dtype not in fitting:
        return frozenset({instr.dtype})
    return fitting


def _holds(dtype: str, value: float) -> bool:
    """Has a 16-bit type this number?"""
    if math.isnan(value) or math.isinf(value):
        return True
    try:
        if dtype == "f16":
            return float(struct.unpack("e", struct.pack("e", value))[0]) == value
        bits = struct.pack("<f", value)
        return float(struct.unpack("<f", bits)[0]) == value and bits[:2] == b"\0\0"
    except OverflowError:
        return False
