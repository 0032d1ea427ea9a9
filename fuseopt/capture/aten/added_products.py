"""Record a small product that is added in place as a product and a copy.

`x.addmm_(a, b)` has the bits of `added(x, a, b)` where `x` is contiguous. The product
can then be in a batch or a chain, and writes nothing that a later error must restore.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .externs import Externs

#: In place -> the op that returns a new tensor.
ADDS = {torch.ops.aten.addmm_.default: torch.ops.aten.addmm.default}
#: New tensors begin at multiples of so many bytes.
ALIGNED = 64
#: The dtypes in which one call has the bits of the other, whatever else is set.
DTYPES = (torch.float32, torch.float64)
#: The most multiplications; a larger product needs no other call, and the copy costs.
MOST = 1 << 23


def record(
    recorder: Externs, func: Any, bound: Mapping[str, Any], out: torch.Tensor
) -> bool:
    """Add the product and the copy; False if the call stays as it is.

    `bound`: the arguments of the call by name.
    """
    if func not in ADDS or out.dtype not in DTYPES or recorder.autocast is not None:
        return False
    left, right = bound["mat1"], bound["mat2"]
    storages = [t.untyped_storage()._cdata for t in (out, left, right)]
    if (
        not out.is_contiguous()
        or out.numel() * left.shape[-1] > MOST
        or not out.numel()
        or not left.shape[-1]
        or storages[0] in storages[1:]
        or recorder.device_of(out) != "cpu"
        or any(t.dtype != out.dtype or t.is_neg() for t in (left, right))
    ):
        return False
    product = recorder.temp_like(out, out.dtype)
    scales = {k: bound[k] for k in ("beta", "alpha") if k in bound}
    reason = "no rule for this op"
    recorder._extern(ADDS[func], (out, left, right), scales, product, reason)
    recorder.calls[-1] = recorder.calls[-1]._replace(func=added)
    return recorder.emit("copy", (("src", product),), out)


def added(
    x: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    *,
    beta: float = 1.0,
    alpha: float = 1.0,
) -> torch.Tensor:
    """Compute `x.addmm_(left, right)`, but leave `x` as it is.

    BLAS may add up in another order where its result begins elsewhere.
    """
    first, out = x.data_ptr() % ALIGNED // x.itemsize, None
    if first:
        out = torch.empty(first + x.numel(), dtype=x.dtype)[first:].view(x.shape)
    made = torch.addmm(x, left, right, beta=beta, alpha=alpha, out=out)
    return made if out is None else made.clone()
