"""Find 16-bit floats that need no rounding, before a kernel runs.

In C++ a 16-bit float is computed in float32 and rounded after each instruction, as
eager rounds. This analysis finds the instructions whose numbers a 16-bit type holds
exactly. It also finds those whose NaN survive a rounding that does not test for NaN.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from ...ir.graph import FLOATS, Instr, Variant
from ..optable import NARROW

#: Opcodes whose result is an operand, or needs no more digits than an operand.
_CHOICES = frozenset("neg abs max min where floor ceil trunc round cast".split())
#: Opcodes whose NaN is the NaN of an operand, or the processor's own.
_ARITHMETIC = _CHOICES | frozenset("add sub mul div fma sqrt".split())
#: Opcodes that keep bits.
_MEMORY = ("load", "bitcast")


@dataclass(frozen=True)
class InstructionFacts:
    """Facts about each instruction.

    `fits`: the 16-bit types that hold its numbers exactly. `calm`: True if its NaN have
    zeros in the half that bfloat16 lacks. Numbers of lane code are calm as element code
    reads them.
    """

    fits: tuple[frozenset[str], ...]
    calm: tuple[bool, ...]


def known(variant: Variant) -> InstructionFacts:
    """Return the facts about each instruction of a variant."""
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
    return InstructionFacts(tuple(fits), tuple(calm))


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
    """Does a 16-bit type hold this number?"""
    if math.isnan(value) or math.isinf(value):
        return True
    try:
        if dtype == "f16":
            return float(struct.unpack("e", struct.pack("e", value))[0]) == value
        bits = struct.pack("<f", value)
        return float(struct.unpack("<f", bits)[0]) == value and bits[:2] == b"\0\0"
    except OverflowError:
        return False
