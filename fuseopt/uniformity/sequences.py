"""Sequences of lanes: lists with equal sequences have the same lane at each place.

`Base` is the parameters of a group. `Part` is the lanes of a sequence that satisfy a
condition on their kind. `Joined` is the concatenation over a loop over groups. `Sorted`
is lanes sorted by kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

#: A place in the code, and the calls that led there.
Site = tuple[Any, ...]


class Branch(NamedTuple):
    """A branch in the code, and the loops around it."""

    site: Site
    turns: tuple[Site, ...]


@dataclass(frozen=True)
class Base:
    """Parameters of a group, which is given by number or by the site of a loop."""

    group: Any


@dataclass(frozen=True)
class Part:
    """Lanes of a sequence that take certain sides of branches.

    Each of `branches`: a `Branch`, and the side that is taken.
    """

    of: Any
    branches: tuple[Any, ...]


@dataclass(frozen=True)
class Joined:
    """Concatenation of a sequence over the turns of some loops."""

    loops: tuple[Site, ...]
    of: Any


@dataclass(frozen=True)
class Sorted:
    """One of the lists into which a call sorted the lanes of a sequence."""

    loop: Site
    of: Any


@dataclass(frozen=True)
class Either:
    """One of several sequences."""

    of: tuple[Any, ...]


def depends(lanes: Any, loop: Site) -> bool:
    """Is it a different sequence in each turn of a loop?"""
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
    """Return the lanes of a sequence that take the given sides of branches."""
    return Part(lanes, branches) if branches else lanes


def joined(lanes: Any, loops: tuple[Site, ...]) -> Any:
    """Return the concatenation over `loops`; the sequence itself if there are none."""
    return Joined(loops, lanes) if loops else lanes
