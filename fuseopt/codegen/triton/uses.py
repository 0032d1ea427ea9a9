"""Readers of the instructions of a variant, and casts."""

from __future__ import annotations

from ...ir.graph import Instr, Variant

#: By instruction, those that read it; None for a store.
Uses = dict[int, list[int | None]]


def readers(v: Variant) -> Uses:
    """Return the readers of each instruction; None for a store."""
    found: Uses = {i: [] for i in range(len(v.instrs))}
    for i in (*v.lane_code, *v.code, *v.output_code):
        for a in v.instrs[i].args:
            found[a].append(i)
    for i, _ in v.stores:
        found[i].append(None)
    return found


def is_cast(instr: Instr, dtype: str) -> bool:
    """Does an instruction convert to a type?"""
    return instr.op == "cast" and instr.dtype == dtype


def all_cast(v: Variant, i: int, uses: Uses, dtype: str) -> bool:
    """Is an instruction read by conversions to a type alone?"""
    return all(u is not None and is_cast(v.instrs[u], dtype) for u in uses[i])


def widens(v: Variant, i: int) -> bool:
    """Is an instruction a bfloat16 in float32?"""
    instr = v.instrs[i]
    return is_cast(instr, "f32") and v.instrs[instr.args[0]].dtype == "bf16"
