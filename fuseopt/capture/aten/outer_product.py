"""Record matrix products without sums: a column times a row is pointwise.

Factored second moments are such products. If both have more than one element, MKL
writes the bare product. Elsewhere eager adds the product to 0, which changes the sign
of a zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ...compat import is_as_ruled

if TYPE_CHECKING:
    from .pointwise import Pointwise

NAMES = frozenset({"mm", "bmm"})


def record(
    recorder: Pointwise, name: str, bound: Mapping[str, Any], out: torch.Tensor
) -> bool:
    """Add the nodes of a product of a column and a row; False if it is none."""
    if name not in NAMES or bound.get("out") is not None or not out.numel():
        return False
    x, y = bound["self"], bound["mat2"]
    if x.shape[-1] != 1 or x.dtype != out.dtype or not x.dtype.is_floating_point:
        return False
    factors = (("self", x), ("other", y))
    bare = name == "mm" and x.dtype in (torch.float32, torch.float64)
    if bare and min(x.shape[0], y.shape[1]) > 1 and is_as_ruled("mm", x.dtype):
        return recorder.emit("mul", factors, out)
    product = recorder.temp_like(out, out.dtype)
    if not recorder.emit("mul", factors, product):
        return False
    return recorder.emit("add", (("self", product), ("other", 0.0)), out)
