"""A step that parts do not suffice for -> the op that needs whole tensors."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..replicate.dry_run import rehearse
from ..shadow.lanes import Lanes, Unlike
from ..shadow.optimizer import Shadow


def op_of_wholes(function: Any, optimizer: Optimizer) -> str:
    """The first op by which a step does more than treat each element alike; "" where
    there is none, or none is found.

    `optimizer`: of parts, with gradients. The step is run dry, for one lane of each
    kind at a time: some parts may have too few elements for what it does to them.
    """
    try:
        lanes = Lanes(optimizer, False, False)
    except Unlike:
        return ""
    for kind in lanes.kinds:
        if not kind.has_grad:
            continue
        shadow = Shadow(optimizer)
        try:
            shadow.refresh(optimizer)
            found = rehearse(shadow.itself, function, lanes, [kind.lanes[0]])
        except Unlike:
            continue
        op: str = found.beyond
        if op:
            return op
    return ""
