"""Products whose result has a place in the arena, and how they write there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..capture.aten.externs import Call
from ..compat import bound_op
from ..ir.graph import Buffer, MemoryPlan

_ATEN = torch.ops.aten
#: By the op of a placed product: its name, and the op that writes into a given tensor.
PLACED: dict[Any, tuple[str, Any]] = {
    _ATEN.mm.default: ("mm", _ATEN.mm.out),
    _ATEN.addmm.default: ("addmm", _ATEN.addmm.out),
    _ATEN.bmm.default: ("bmm", _ATEN.bmm.out),
    _ATEN.baddbmm.default: ("baddbmm", _ATEN.baddbmm.out),
}


def placed(call: Call, buffers: Sequence[Buffer], plan: MemoryPlan) -> int | None:
    """Return the result of a placed product, None for other calls."""
    if call.func not in PLACED or len(call.outputs) != 1:
        return None
    (b,) = call.outputs
    return b if b in call.fresh and buffers[b].storage in plan.offsets else None


def writes_given(call: Call) -> Any:
    """Return the function that computes a placed product into `out`."""
    return bound_op(PLACED[call.func][1])
