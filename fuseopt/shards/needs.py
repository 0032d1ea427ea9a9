"""Find the op for which a step needs whole tensors, not only local parts."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes
from ..replicate.dry_run import rehearse
from ..shadow.optimizer import Shadow


def op_of_wholes(function: Any, optimizer: Optimizer) -> str:
    """Return the first op of a step that does not treat each element alike, or "".

    `optimizer` is the local one, with gradients. The step is rehearsed for one lane of
    each kind separately, since some local parts may have too few elements for it.
    """
    try:
        lanes = Lanes(optimizer, False, False)
    except LanesDiffer:
        return ""
    for kind in lanes.kinds:
        if not kind.has_grad:
            continue
        shadow = Shadow(optimizer)
        try:
            shadow.refresh(optimizer)
            record = rehearse(shadow.stand_in, function, lanes, [kind.lanes[0]])
        except LanesDiffer:
            continue
        op: str = record.beyond
        if op:
            return op
    return ""
