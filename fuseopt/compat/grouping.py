"""Order in which torch's foreach functions process tensors of several dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .capability import probed
from .names import find, takes

GROUP = "torch.utils._foreach_utils:_group_tensors_by_device_and_dtype"


@probed(
    "dtype-order",
    "sums over tensors of several dtypes have eager's order",
    "a tail or a clip over tensors of several dtypes runs in eager",
)
def DTYPE_ORDER() -> None:
    takes(find(GROUP), "tensorlistlist")


def dtypes_in_order(tensors: Sequence[torch.Tensor]) -> list[torch.dtype] | None:
    """Return the dtypes of tensors of one device, in the order of torch's foreach
    functions.

    [] if there is only one dtype. The order is that of a hash table of torch. While
    torch is traced, all tensors are one list, so that sums over dtypes get another
    order. Relies on the function that makes the table; None if it is missing.
    """
    if len({t.dtype for t in tensors}) < 2:
        return []
    if not DTYPE_ORDER.available():
        return None
    group = find(GROUP)
    return [dtype for _, dtype in group([list(tensors)])]
