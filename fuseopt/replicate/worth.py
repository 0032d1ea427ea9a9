"""Decide whether leading a step with these lanes pays."""

from __future__ import annotations

from itertools import chain, repeat
from operator import attrgetter, is_not

from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..inputs.lane_matcher import PARAMS
from ..inputs.lanes import Lanes

#: Optimizers of fewer lanes than this are traced whole.
FEW = 6
#: While a lane lacks a gradient, this limit applies. A few lanes have other kinds in
#: nearly each call then, and each set of kinds needs a trace.
MANY = 16
#: At most this share of the lanes may lead.
SHARE = 0.5
#: The end of the reason when more lanes would lead.
UNLIKE = "lanes are unlike"
_GRAD = attrgetter("grad")


def many_lanes(optimizer: Optimizer) -> bool:
    """Does an optimizer have so many lanes that tracing a few of them pays?"""
    return sum(map(len, map(PARAMS, optimizer.param_groups))) >= FEW


def may_lead(optimizer: Optimizer) -> bool:
    """Does an optimizer have many lanes, or a few that all have a gradient?"""
    lists = [*map(PARAMS, optimizer.param_groups)]
    n = sum(map(len, lists))
    if n < FEW or n >= MANY:
        return n >= MANY
    grads = map(_GRAD, chain.from_iterable(lists))
    return all(map(is_not, grads, repeat(None)))


def check_alike(lanes: Lanes) -> None:
    """Raise LanesDiffer if too many lanes would lead."""
    few = len({(kind.key[:2], repr(kind.numbers)) for kind in lanes.kinds})
    if few > SHARE * len(lanes.params):
        raise LanesDiffer(f"{few} of its {len(lanes.params)} {UNLIKE}")
