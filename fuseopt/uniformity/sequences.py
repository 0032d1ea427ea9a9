"""Sequences of lanes: which lists have the same lane at the same place?

Lists that name equal sequences are aligned: the items at one place are of one lane.
`Base` is the parameters of a group. What a condition on the kind of a lane leaves of a
sequence is `Part`; what a loop over groups puts together is `Joined`; lanes sorted by
kind are `Sorted`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

#: Names a place in the code, and the calls that led there.
Site = tuple[Any, ...]


class Branch(NamedTuple):
    """A place where ways part, and the loops in which it does."""

    site: Site
    turns: tuple[Site, ...]


@dataclass(frozen=True)
class Base:
    """The parameters of a group: of the one with a number, or the one a loop is at."""

    group: Any


@dataclass(frozen=True)
class Part:
    """The lanes of a sequence that take certain sides of branches.

    Each of `branches`: a `Branch`, and the side that is taken.
    """

    of: Any
    branches: tuple[Any, ...]


@dataclass(frozen=True)
class Joined:
    """The concatenation of a sequence over the turns of some loops."""

    loops: tuple[Site, ...]
    of: Any


@dataclass(frozen=True)
class Sorted:
    """One of the lists that the lanes of a sequence were sorted into by a call."""

    loop: Site
    of: Any


@dataclass(frozen=True)
class Either:
    """One of several sequences."""

    of: tuple[Any, ...]


def depends(lanes: Any, loop: Site) -> bool:
    """Is it another sequence in each turn of a loop?"""
    if isinstance(lanes, Base):
        return bool(lanes.group == loop)
    if isinstance(lanes, Joined):
        return loop not in lanes.loops and depends(lanes.of, loop)
    if isinstance(lanes, Sorted):
        return lanes.loop == loop or depends(lanes.of, loop)
    if isinstance(lanes, Either):
        return any(depends(x, loop) for x in lanes.of)
    if isinstance(lanes, Part):
        # a branch may select other lanes when it is reached again
        if any(loop in branch.turns for branch, _ in lanes.branches):
            return True
    return depends(lanes.of, loop)


def deals(lanes: Any, loop: Site) -> bool:
    """Do the turns of a loop partition the lanes, each in exactly one turn?"""
    if isinstance(lanes, Base):
        return bool(lanes.group == loop)
    if isinstance(lanes, Sorted):
        return lanes.loop == loop or deals(lanes.of, loop)
    if isinstance(lanes, Part):
        return deals(lanes.of, loop)
    return False


def part(lanes: Any, branches: tuple[Any, ...]) -> Any:
    """The lanes of a sequence that take the given sides of branches."""
    return Part(lanes, branches) if branches else lanes


def joined(lanes: Any, loops: tuple[Site, ...]) -> Any:
    """The concatenation over `loops`; the sequence itself if there are none."""
    return Joined(loops, lanes) if loops else lanes
