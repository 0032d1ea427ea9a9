"""Placements of an optimizer's parameters."""

from __future__ import annotations

from torch.optim import Optimizer

from .. import compat

_PARAMS = "params"


def is_spread(optimizer: Optimizer) -> bool:
    """Is a parameter of an optimizer a DTensor?"""
    kind = compat.dtensor_type()
    return kind is not None and any(
        isinstance(p, kind) for group in optimizer.param_groups for p in group[_PARAMS]
    )


def placed(optimizer: Optimizer) -> str:
    """Return a text with the placements of an optimizer's parameters, at most three."""
    kind = compat.dtensor_type()
    placements = {
        ", ".join(map(str, compat.spec_of(p).placements)): None
        for group in optimizer.param_groups
        for p in group[_PARAMS]
        if kind is not None and isinstance(p, kind)
    }
    return " or ".join([*placements][:3]) + (
        " or otherwise" if len(placements) > 3 else ""
    )
