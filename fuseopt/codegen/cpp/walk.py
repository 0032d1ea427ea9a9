"""The C++ that goes over tensors of different layouts, a block of elements at a time.

A block is so many steps along one dimension, times all elements of the dimensions
within it; it is alike wherever it begins, so that one list of offsets serves a whole
lane. A tensor whose elements of a block are neighbours is read and written where it
lies. Of others the elements are gathered first and scattered afterwards: element code
only ever sees neighbours, and has one text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Walked(NamedTuple):
    """A slot that is walked over: its number, its C++ type, what is done with it."""

    slot: int
    kind: str
    read: bool
    write: bool


def rooms(slots: Sequence[Walked]) -> list[str]:
    """Memory for a block of each slot."""
    return [f"alignas(64) {x.kind} b{x.slot}[GATHERED];" for x in slots]


def gathers(walk: str, slots: Sequence[Walked], n: str, first: int = 0) -> list[str]:
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


def scatters(walk: str, slots: Sequence[Walked], n: str, first: int = 0) -> list[str]:
    """Bring back what was written to neighbours; `first`: as of `gathers`."""
    return [
        f"{walk}.scatter({k}, p{x.slot}, q{x.slot}, {n});"
        for k, x in enumerate(slots, first)
        if x.write
    ]
