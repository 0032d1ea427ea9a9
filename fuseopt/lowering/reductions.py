"""Lower ATen's reductions to a Body: the arithmetic per element, and the fold.

The order of a sum decides its bits. On a CPU, dense operands are folded in the order of
eager's kernels (codegen/cpp/reduce.py describes it); a GPU has its own order.
docs/numerics.md lists the inexact cases.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ..ir.graph import FLOATS, FROM_BF16, FROM_F16, NATIVE, Body, Instr
from .pointwise import opmath


class Fold(NamedTuple):
    """A reduction: `before` each element, the `fold`, and the op on its result.

    `after`: "" or "root" (a square root) or "mean" (a quotient by the count). `empty`:
    the result over no elements, None if eager raises.
    """

    before: str
    fold: str
    after: str = ""
    empty: float | None = 0.0


FOLDS: dict[str, Fold] = {
    "sum": Fold("", "sum"),
    "mean": Fold("", "sum", "mean", math.nan),
    "norm0": Fold("count", "fold"),
    "norm1": Fold("abs", "fold"),
    "norm2": Fold("", "sumsq", "root"),
    "norm_inf": Fold("abs", "largest"),
    "norm_minus_inf": Fold("abs", "least", empty=None),
    "amax": Fold("", "largest", empty=None),
    "amin": Fold("", "least", empty=None),
    "any": Fold("true", "largest"),
    "all": Fold("true", "least", empty=1.0),
    "dot": Fold("product", "sum"),
}


def accumulator(kind: str, dtype: str) -> str:
    """Return the dtype in which elements of `dtype` are folded."""
    fold = FOLDS[kind]
    if fold.before == "true":
        return "i32"
    if fold.fold in ("largest", "least"):
        return "i32" if dtype == "b8" else opmath(dtype)
    return opmath(dtype) if dtype in FLOATS else "i64"


def lower_reduction(kind: str, dtype: str, full: bool, cast: str = "") -> Body:
    """Return the body of a reduction of a tensor of `dtype`; "dot" has two.

    `full`: fold to one number. `cast`: the dtype to which elements are converted first.
    """
    fold = FOLDS[kind]
    acc = accumulator(kind, cast or dtype)
    instrs: list[Instr] = []

    def op(name: str, *args: int, dtype: str = acc, attr: float | None = None) -> int:
        instrs.append(Instr(name, args, dtype, attr))
        return len(instrs) - 1

    def operand(position: int) -> int:
        x = op("load", dtype=dtype, attr=position)
        return x if dtype == acc else op("cast", x)

    if fold.before in ("true", "count"):
        x = op("load", dtype=dtype, attr=0)
        x = op("ne", x, op("const", dtype=dtype, attr=0.0), dtype="b8")
        x = op("cast", x)
    else:
        x = operand(0)
        if fold.before == "abs":
            x = op("abs", x)
        elif fold.before == "product":
            x = op("mul", x, operand(1))
    loaded = NATIVE if cast else {"bf16": FROM_BF16, "f16": FROM_F16}.get(dtype, NATIVE)
    result = op(fold.fold, x, attr=loaded)
    reads = (dtype, dtype) if fold.before == "product" else (dtype,)
    return Body(
        kind, reads, 0, tuple(instrs), ((result, acc),), "full" if full else "dims"
    )
