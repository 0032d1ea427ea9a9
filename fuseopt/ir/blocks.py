"""Blocks of elements: so many neighbours of a lane, which have numbers in common.

Elements are counted as they lie in a contiguous tensor of the lane's shape. A buffer of
blocks has a number for each, the last of which may be of fewer elements. Blocks of
several sizes lie in each other, since sizes are powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .nodes import Body, Instr

#: Instructions that make one number of the elements of a block.
FOLDS = frozenset({"block_largest", "block_least"})
#: Instructions whose attribute is the number of elements of a block.
SIZED = FOLDS | {"spread", "first"}
#: Sizes that blocks may have.
SIZES = tuple(1 << k for k in range(6, 13))


def count(numel: int, size: int) -> int:
    """The number of blocks of a lane of so many elements."""
    return -(-numel // size)


def size_of(instrs: Iterable[Instr]) -> int:
    """The largest size of blocks that instructions use; 0 if they use none."""
    return max((int(i.attr or 0) for i in instrs if i.op in SIZED), default=0)


def sizes_of(instrs: Iterable[Instr]) -> set[int]:
    """All sizes of blocks that instructions use."""
    return {int(i.attr or 0) for i in instrs if i.op in SIZED}


def read_by_block(instrs: Sequence[Instr]) -> dict[int, int]:
    """Return the size of blocks of each slot that is read by block."""
    return {
        int(instrs[i.args[0]].attr or 0): int(i.attr or 0)
        for i in instrs
        if i.op == "spread"
    }


def write_by_block(body: Body, k: int) -> int:
    """The size of blocks for each of which result k has a number; 0 if for elements."""
    instr = body.instrs[body.writes[k][0]]
    return int(instr.attr or 0) if instr.op == "first" else 0


def slot_sizes(
    instrs: Sequence[Instr], stores: Iterable[tuple[int, int]]
) -> dict[int, int]:
    """Return the size of blocks of each slot that has a number for each block."""
    made = {s: int(instrs[x].attr or 0) for x, s in stores if instrs[x].op == "first"}
    return {**read_by_block(instrs), **made}


def uniform(instrs: Sequence[Instr], elements: Iterable[int]) -> dict[int, int]:
    """Return the instructions whose result all elements of a block share, and the size
    of that block.
    """
    inside = set(elements)
    found: dict[int, int] = {}
    for x in sorted(inside):
        instr = instrs[x]
        if instr.op in SIZED:
            found[x] = int(instr.attr or 0)
        elif instr.op not in ("load", "tail", "index") and instr.args:
            if all(a in found or a not in inside for a in instr.args):
                found[x] = min(found[a] for a in instr.args if a in found)
    return found
