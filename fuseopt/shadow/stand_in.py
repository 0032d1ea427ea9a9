"""Make an object in place of an optimizer, and the different options of its groups."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.optim import Optimizer

from ..compiler.session import session
from ..inputs.keys import LanesDiffer


def unfused(group: dict[str, Any]) -> dict[str, bool]:
    """Return a group's options in place of `fused=True`: those of the foreach step.

    Empty for a group without `fused`. On devices other than the CPU it sets
    `capturable` too, so that step counters are on the device, as for the fused kernels.
    Otherwise Adam's foreach step accepts no tensors as rate or betas, but its loop
    does.
    """
    if not group.get("fused"):
        return {}
    form = {"fused": False, "foreach": True}
    if any(p.device.type != "cpu" for p in group["params"]):
        form["capturable"] = True
    elif group.get("capturable") is False:
        numbers = group.get("lr"), *(group.get("betas") or ())
        form["foreach"] = not any(isinstance(x, torch.Tensor) for x in numbers)
    return {key: value for key, value in form.items() if key in group}


def stand_in(optimizer: Optimizer) -> Any:
    """Return an object of an optimizer's class without attributes.

    Raises LanesDiffer for an optimizer that no other object can replace.
    """
    kind = type(optimizer)
    for c in kind.__mro__:
        if any(isinstance(x, types.MemberDescriptorType) for x in vars(c).values()):
            raise LanesDiffer(f"{c.__name__} keeps attributes in slots")
    if hasattr(kind, "__del__"):
        raise LanesDiffer(f"{kind.__name__} has a __del__")
    shadow = object.__new__(kind)
    session.isolated.add(shadow)
    return shadow
