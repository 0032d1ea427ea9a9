"""Is it worth while to lead the step of an optimizer with these lanes?"""

from __future__ import annotations

from operator import itemgetter

from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes

#: Optimizers of fewer lanes than this are traced whole.
FEW = 16
#: The same of a tail, whose led form asks less of the host in each call.
FEW_OF_TAIL = 6
#: At most this share of the lanes may lead.
SHARE = 0.5
#: How the reason ends where more would lead.
UNLIKE = "lanes are unlike"
_PARAMS = itemgetter("params")


def many_lanes(optimizer: Optimizer, few: int | None = None) -> bool:
    """Has an optimizer at least `few` lanes, so that tracing a few of them pays? None:
    FEW.
    """
    lanes = sum(map(len, map(_PARAMS, optimizer.param_groups)))
    return lanes >= (FEW if few is None else few)


def check_alike(lanes: Lanes) -> None:
    """Raise LanesDiffer where too many lanes would lead."""
    few = len({(kind.key[:2], repr(kind.numbers)) for kind in lanes.kinds})
    if few > SHARE * len(lanes.params):
        raise LanesDiffer(f"{few} of its {len(lanes.params)} {UNLIKE}")
