"""Decide whether leading a step with these lanes pays."""

from __future__ import annotations

from operator import itemgetter

from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes

#: Optimizers of fewer lanes than this are traced whole.
FEW = 6
#: This limit applies on devices, and while a lane lacks a gradient. A few lanes have
#: other kinds in nearly each call then, and each set of kinds needs a trace.
MANY = 16
#: At most this share of the lanes may lead.
SHARE = 0.5
#: The end of the reason when more lanes would lead.
UNLIKE = "lanes are unlike"
_PARAMS = itemgetter("params")


def many_lanes(optimizer: Optimizer) -> bool:
    """Does an optimizer have so many lanes that tracing a few of them pays?"""
    return sum(map(len, map(_PARAMS, optimizer.param_groups))) >= FEW


def may_lead(optimizer: Optimizer) -> bool:
    """Does an optimizer have many lanes, or a few on the CPU that have gradients?"""
    if not many_lanes(optimizer):
        return False
    params = [p for of_group in map(_PARAMS, optimizer.param_groups) for p in of_group]
    return len(params) >= MANY or all(p.is_cpu and p.grad is not None for p in params)


def check_alike(lanes: Lanes) -> None:
    """Raise LanesDiffer if too many lanes would lead."""
    few = len({(kind.key[:2], repr(kind.numbers)) for kind in lanes.kinds})
    if few > SHARE * len(lanes.params):
        raise LanesDiffer(f"{few} of its {len(lanes.params)} {UNLIKE}")
