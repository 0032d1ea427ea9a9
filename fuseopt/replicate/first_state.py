"""Create the state of all lanes without state, as tracing creates it for models."""

from __future__ import annotations

import types
from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes


def first_state(
    optimizer: Optimizer, shadow: Any, lanes: Lanes
) -> dict[torch.Tensor, dict[str, Any]]:
    """Return the new state of the lanes without state, by parameter.

    `shadow`: a shadow of the optimizer with all lanes. Raises LanesDiffer.
    """
    before = dict(optimizer.state)
    if not compat.initialize(shadow):
        raise LanesDiffer("the trace made state, and fuseopt cannot repeat that")
    if not all(_same(shadow.state[p], entries) for p, entries in before.items()):
        raise LanesDiffer("the trace changes state")
    return {
        p: shadow.state[p]
        for p in lanes.params
        if p in shadow.state and p not in before
    }


def with_state(optimizer: Any, fresh: Mapping[torch.Tensor, Any]) -> Any:
    """Return a view of an optimizer with the state that lanes get in this call."""
    state = {**optimizer.state, **fresh}
    return types.SimpleNamespace(state=state, param_groups=optimizer.param_groups)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return tuple(a) == tuple(b) and all(map(is_, a.values(), b.values()))
