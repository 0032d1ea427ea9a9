"""Groups whose parameters are not lists, unlike torch's own groups.

fuseopt may trace, time and compare a step more than once, each time from its
parameters. An iterator yields these once, and then eager's step does nothing.
"""

from __future__ import annotations

from torch.optim import Optimizer

#: The type that torch gives to the parameters of a group.
LISTS = frozenset({list})


def read_once(optimizer: Optimizer) -> str:
    """Return the reason why groups or parameters cannot be read again, or "".

    An iterator can be read only once.
    """
    groups = optimizer.param_groups
    if _ends(groups):
        return f"its groups are a {type(groups).__name__}, which has no length"
    for number, group in enumerate(groups):
        params = group["params"]
        if _ends(params):
            kind = type(params).__name__
            return f"the parameters of group {number} are a {kind}, which has no length"
    return ""


def _ends(x: object) -> bool:
    """Can an object be iterated over only once?"""
    return hasattr(x, "__iter__") and not hasattr(x, "__len__")
