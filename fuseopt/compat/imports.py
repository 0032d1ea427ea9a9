"""Spare the import of Inductor, which Dynamo does when it traces an optimizer."""

from __future__ import annotations

import functools
import sys
from typing import Any

#: Holds the CUDA graphs that Inductor captured; importing it imports all of Inductor.
CAPTURED = "torch._inductor.cudagraph_trees"


def spare_inductor() -> None:
    """Let Dynamo trace an optimizer without importing Inductor, a second's work.

    For each gradient Dynamo asks whether Inductor captured it in a graph, only to say
    so in a log. As long as nobody has imported the module that captures, nothing was
    captured, and the answer is what remains of the question. Relies on the function
    that asks; where it is missing, or asks of another module, Dynamo imports as ever.
    """
    try:
        import torch._dynamo.variables.optimizer as place
        from torch._dynamo.utils import get_static_address_type

        asked = place._is_static_for_cudagraphs
    except (ImportError, AttributeError):
        return

    @functools.wraps(asked)
    def is_static(x: Any) -> bool:
        if CAPTURED in sys.modules:
            return asked(x)
        return not x.is_cuda or get_static_address_type(x) is not None

    place._is_static_for_cudagraphs = is_static
