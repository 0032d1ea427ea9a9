"""Record ATen's reductions: a node that folds, and pointwise nodes on its result.

`recognise` returns the reduction of a call, and `record` adds its nodes. A reduction
keeps its full precision in a temp. A root, a mean's quotient and the rounding to the
result's dtype are pointwise nodes on that temp, in the same kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...ir.graph import FLOATS
from ...lowering.reductions import FOLDS, accumulator, lower_reduction
from .buffers import as_lane_number
from .dtypes import DTYPE_NAMES, NAMED_DTYPES

if TYPE_CHECKING:
    from .pointwise import Pointwise

#: ATen names of reductions that need no further look at their arguments.
PLAIN = {
    "sum": "sum",
    "mean": "mean",
    "amax": "amax",
    "amin": "amin",
    "max": "amax",
    "min": "amin",
    "any": "any",
    "all": "all",
    "dot": "dot",
}
#: For these names an empty list means no dimension; for others it means all.
OVER_NO_DIMENSION = {"any", "all"}
NORMS = {
    0.0: "norm0",
    1.0: "norm1",
    2.0: "norm2",
    math.inf: "norm_inf",
    -math.inf: "norm_minus_inf",
}


class Reduction(NamedTuple):
    """A reduction of `operands` over `dims`.

    `cast`: the name of the dtype to which the operands are converted first, or "".
    """

    kind: str
    operands: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    cast: str

    @property
    def is_undefined(self) -> bool:
        """Does it have no elements, and no result for that case (as amax)?"""
        return self.operands[0].numel() == 0 and FOLDS[self.kind].empty is None


def recognise(name: str, bound: Mapping[str, Any]) -> Reduction | None:
    """Return the Reduction of a call of ATen's `name`; None if it has no rule."""
    x = bound.get("self")
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPE_NAMES:
        return None
    if name in ("linalg_vector_norm", "norm"):
        order = bound.get("ord", bound.get("p", 2))
        order = 2 if order is None else order
        if isinstance(order, bool) or not isinstance(order, (int, float)):
            return None
        kind = NORMS.get(float(order), "")
        if not kind or not x.dtype.is_floating_point:
            return None
    else:
        kind = PLAIN.get(name, "")
        if not kind:
            return None
    cast = ""
    wanted = bound.get("dtype")
    if wanted is not None and wanted != x.dtype:
        if kind not in ("sum", "mean") or wanted not in DTYPE_NAMES:
            return None
        cast = DTYPE_NAMES[wanted]
    if kind == "mean" and not cast and x.dtype in (torch.bfloat16, torch.float16):
        cast = "f32"  # eager casts, adds and divides in float32
    operands: tuple[torch.Tensor, ...] = (x,)
    if kind == "dot":
        y = bound.get("tensor")
        if not isinstance(y, torch.Tensor) or y.dtype != x.dtype:
            return None
        if x.dtype not in (torch.float32, torch.float64):
            return None
        operands = (x, y)
    if any(n in bound and bound[n] is not None for n in ("out", "other")):
        return None
    dims = bound.get("dim")
    every = tuple(range(x.dim()))
    if dims is None or (isinstance(dims, Sequence) and not dims):
        if dims is not None and name in OVER_NO_DIMENSION:
            return None
        dims = every
    elif isinstance(dims, int):
        if name in ("max", "min"):
            return None  # these return indices too
        dims = (dims,)
    taken = sorted(d % x.dim() for d in dims) if every else ()
    return Reduction(kind, operands, tuple(taken), cast)


def record(recorder: Pointwise, reduction: Reduction, out: torch.Tensor) -> bool:
    """Add the nodes of a reduction into `out`; return False if impossible."""
    x = reduction.operands[0]
    if reduction.kind in ("norm1", "norm2") and all(
        x.shape[d] == 1 for d in reduction.dims
    ):
        # for single elements eager takes the absolute value, which cannot overflow
        reduction = reduction._replace(kind="norm_inf")
    fold = FOLDS[reduction.kind]
    if reduction.is_undefined:
        return False
    if x.numel() == 0:
        return recorder.emit("fill", (("value", fold.empty),), out)
    dtype = DTYPE_NAMES[x.dtype]
    acc = accumulator(reduction.kind, reduction.cast or dtype)
    if acc not in FLOATS and fold.after:
        return False
    if as_lane_number(x).dim() == 0:
        return _one_number(recorder, reduction, out, acc)
    # dimensions of size 1 make no difference
    full = all(d in reduction.dims or n == 1 for d, n in enumerate(x.shape))
    dims = tuple(range(x.dim())) if full else reduction.dims
    body = lower_reduction(reduction.kind, dtype, full, reduction.cast)
    direct = not fold.after and NAMED_DTYPES[acc] == out.dtype
    result = out if direct else recorder.temp_like(out, NAMED_DTYPES[acc])
    recorder.reduce(body, reduction.operands, dims, result)
    if direct:
        return True
    if fold.after == "root":
        return recorder.emit("root", (("self", result),), out)
    if fold.after == "mean":
        count = float(x.numel() // max(out.numel(), 1))
        return recorder.emit("div", (("self", result), ("other", count)), out)
    return recorder.emit("copy", (("src", result),), out)


def _one_number(
    recorder: Pointwise, reduction: Reduction, out: torch.Tensor, acc: str
) -> bool:
    """Record a reduction of one element as arithmetic."""
    x = as_lane_number(reduction.operands[0])
    before = FOLDS[reduction.kind].before
    if before in ("true", "count"):
        return recorder.emit("ne", (("self", x), ("other", 0)), out)
    if before == "abs":
        return recorder.emit("abs", (("self", x),), out)
    if FOLDS[reduction.kind].fold in ("largest", "least"):
        return recorder.emit("copy", (("src", x),), out)
    wide = recorder.temp_like(out, NAMED_DTYPES[acc])
    if before == "product":
        recorder.emit("mul", (("self", x), ("other", reduction.operands[1])), wide)
    else:
        recorder.emit("copy", (("src", x),), wide)
    # a sum begins at 0, so that the sum of -0.0 is 0.0
    return recorder.emit("add", (("self", wide), ("other", 0)), out)
