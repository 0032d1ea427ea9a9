"""The order in which torch's functions of lists go over tensors of several dtypes."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch


def dtypes_in_order(tensors: Sequence[torch.Tensor]) -> list[torch.dtype] | None:
    """The dtypes of tensors of one device, in the order in which torch's functions of
    lists go over them; [] where there is but one.

    It is that of a hash table of torch's, of which Dynamo knows nothing: while torch is
    traced, all tensors are one list, and what sums over dtypes gets another order.
    Relies on the function that makes the table; None where it is missing.
    """
    if len({t.dtype for t in tensors}) < 2:
        return []
    home = importlib.import_module("torch.utils._foreach_utils")
    group = getattr(home, "_group_tensors_by_device_and_dtype", None)
    return None if group is None else [dtype for _, dtype in group([list(tensors)])]
