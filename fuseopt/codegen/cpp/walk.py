"""C++ that walks over tensors of different layouts, a block of elements at a time.

A block is a number of steps along one dimension, times all elements of the dimensions
within it. All blocks have the same offsets, so that one list serves a whole lane. If
the elements of a block are neighbours in a tensor, they are read and written in place.
Otherwise they are gathered first and scattered afterwards. So element code always gets
neighbours, and has one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WalkedSlot(NamedTuple):
    """A slot that is walked over: its number, its C++ type, and its use."""

    slot: int
    kind: str
    read: bool
    write: bool


def rooms(slots: Sequence[WalkedSlot]) -> list[str]:
    """Declare memory for a block of each slot."""
    return [f"alignas(64) {x.kind} b{x.slot}[GATHERED];" for x in slots]


def gathers(
    walk: str, slots: Sequence[WalkedSlot], n: str, first: int = 0
) -> list[str]:
    """Pointers q to n neighbours each, of pointers p to tensors. `first`: the number of
    the first slot among those of the walk.
    """
    return [
        f"{x.kind}* const q{x.slot} = "
        + (
            f"{walk}.gather({k}, p{x.slot}, b{x.slot}, {n});"
            if x.read
            else f"{walk}.place({k}, p{x.slot}, b{x.slot});"
        )
        for k, x in enumerate(slots, first)
    ]


def scatters(
    walk: str, slots: Sequence[WalkedSlot], n: str, first: int = 0
) -> list[str]:
    """Bring back what was written to neighbours; `first`: as of `gathers`."""
    return [
        f"{walk}.scatter({k}, p{x.slot}, q{x.slot}, {n});"
        for k, x in enumerate(slots, first)
        if x.write
    ]
