"""Trace the lists of an optimizer in groups of one device and dtype, as eager has them.

While a step is traced, torch leaves all tensors in one group. Code that decides
something for a whole group then decides it for all dtypes at once: SGD, whether each
parameter has a momentum.
"""

from __future__ import annotations

import types
from operator import attrgetter
from typing import Any

import torch

from .layers import traces_for
from .names import find
from .patches import Hook, Patcher, patch

#: torch.optim's function that groups lists of tensors.
GROUP = "torch.optim:Optimizer._group_tensors_by_device_and_dtype"
_KEY = attrgetter("device", "dtype")


def grouped(lists: Any, with_indices: bool = False) -> Any:
    """Group tensors by the device and dtype of those of the first list.

    Runs while Dynamo traces it. lists: lists of one length, or empty. Returns a dict:
    (device, dtype) to the lists of that group and the indices of its tensors. If there
    is one group only, it has the key that torch gives it in a trace.
    """
    first = lists[0]
    places: dict[Any, list[int]] = {}
    for index, tensor in enumerate(first):
        key = (tensor.device, tensor.dtype)
        if key not in places:
            places[key] = []
        places[key].append(index)
    if len(places) < 2:
        return {(None, None): (lists, list(range(len(first))))}
    return {
        key: ([[x[i] for i in chosen] if x else [] for x in lists], chosen)
        for key, chosen in places.items()
    }


@patch(
    "dtype-groups",
    "an optimizer's lists are traced in groups of one dtype, as eager has them",
    "a step with a foreach group of several dtypes runs in eager",
    bits=True,
)
def DTYPE_GROUPS(patcher: Patcher) -> None:
    """Trace `grouped` instead of the function of torch.optim that groups lists."""
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    functions = find("torch._dynamo.variables.functions:UserFunctionVariable")
    function = find(GROUP)
    backend = patcher.backend

    def call(original: Hook, this: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if this.fn is not function or not traces_for(tx, backend):
            return original(this, tx, args, kwargs)
        own = VariableTracker.build(tx, grouped)
        return tx.inline_user_function_return(own, list(args), kwargs)

    patcher.around(functions, "call_function", call, "self", "tx", "args", "kwargs")


def groups_dtypes(frame: types.FrameType) -> bool:
    """Is it the function of torch.optim, with several groups, and is it traced so?"""
    function = find(GROUP, None)
    if function is None or frame.f_code is not function.__code__:
        return False
    first = frame.f_locals["tensorlistlist"][0]
    return len({*map(_KEY, first)}) > 1 and DTYPE_GROUPS.available()


def mixes_dtypes(optimizer: torch.optim.Optimizer) -> bool:
    """May a group of an optimizer hand torch lists of several devices or dtypes?"""
    return any(
        group.get("foreach") is not False and len({*map(_KEY, group["params"])}) > 1
        for group in optimizer.param_groups
    )
