"""Avoid the import of Inductor when Dynamo traces an optimizer."""

from __future__ import annotations

import sys
from typing import Any

from .names import find
from .patches import Hook, Patcher, patch

#: Holds the CUDA graphs that Inductor captured; importing it imports all of Inductor.
CAPTURED = "torch._inductor.cudagraph_trees"


@patch(
    "spared-inductor",
    "Inductor is not imported when an optimizer's step is traced",
    "the first step of a process takes a second longer",
)
def SPARED_INDUCTOR(patcher: Patcher) -> None:
    """Trace an optimizer without importing Inductor.

    Dynamo checks for each gradient whether Inductor captured it in a graph, only for a
    log. Until the module that captures is imported, nothing was captured. The hook then
    returns the remaining part of the result.
    """
    place = find("torch._dynamo.variables.optimizer")
    address_of = find("torch._dynamo.utils:get_static_address_type")

    def is_static(original: Hook, x: Any) -> bool:
        if CAPTURED in sys.modules:
            return bool(original(x))
        return not x.is_cuda or address_of(x) is not None

    patcher.around(place, "_is_static_for_cudagraphs", is_static, "x")
