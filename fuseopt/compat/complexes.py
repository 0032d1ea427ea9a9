"""Keep symbolic the numbers that change between calls, beside complex tensors."""

from __future__ import annotations

from typing import Any

import torch

from .names import find
from .patches import Hook, Patcher, patch
from .symbols import FLOATS, hint_of
from .tracing import traces_step


@patch(
    "complex-symbols",
    "a number that moves is a symbol in a call with complex tensors, too",
    "a step that gives such a number to a call with complex tensors is compiled anew "
    "at each value",
    needs=(FLOATS,),
)
def COMPLEX(patcher: Patcher) -> None:
    """Make a symbol complex without a guard on its value.

    While it traces, torch computes only a result's shape, strides and dtype. It first
    converts each number to a Python number of the compute dtype. There is no symbolic
    complex number, so that this would fix the value. Shape, strides and dtype do not
    depend on the value of a complex number.
    """
    home = find("torch._prims_common")
    symbols = torch.SymInt, torch.SymFloat

    def constructor(original: Hook, dtype: torch.dtype) -> Any:
        made = original(dtype)
        if not dtype.is_complex or not traces_step():
            return made

        def number(x: Any) -> Any:
            return complex(hint_of(x)) if isinstance(x, symbols) else made(x)

        return number

    patcher.around(home, "dtype_to_type_ctor", constructor, "dtype")
