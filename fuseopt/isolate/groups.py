"""Groups whose parameters are no lists, as torch's own are.

A step may be traced, timed and compared more than once, each time from its parameters.
An iterator yields these once, and then eager's step does nothing.
"""

from __future__ import annotations

from operator import itemgetter

from torch.optim import Optimizer

#: Of a group.
PARAMS = itemgetter("params")
#: The type of the parameters of a group, as torch makes it.
LISTS = frozenset({list})


def read_once(optimizer: Optimizer) -> str:
    """Why the groups of an optimizer, or the parameters of one, can be read only once,
    or never; "" if they can be read again and again.
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
    """May something be gone through once only?"""
    return hasattr(x, "__iter__") and not hasattr(x, "__len__")
