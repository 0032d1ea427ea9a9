"""Arithmetic on numpy's arrays, which Dynamo does with torch.

Dynamo takes an array for a tensor, and each function of numpy's for one of
torch._numpy, which calls torch. What only moves elements has numpy's bits. A sum has
another order, and exp, pow and the like are other functions.
"""

from __future__ import annotations

import torch

#: What Dynamo calls in place of functions, methods and operators of numpy's.
WRAPPERS = frozenset(
    {"numpy_to_tensor_wrapper", "numpy_method_wrapper", "numpy_operator_wrapper"}
)
#: Those that compute nothing, or round once as numpy does.
SAME = frozenset(
    {
        *("item", "tolist", "copy", "reshape", "ravel", "flatten", "transpose"),
        *("squeeze", "swapaxes", "getitem", "setitem", "fill", "asarray", "array"),
        *("ascontiguousarray", "empty", "zeros", "ones", "full", "arange"),
        *("empty_like", "zeros_like", "ones_like", "full_like"),
        *("neg", "pos", "abs", "eq", "ne", "lt", "le", "gt", "ge"),
    }
)


def other_arithmetic(gm: torch.fx.GraphModule) -> str:
    """What a graph computes of arrays with other bits than numpy's, "" if nothing."""
    for node in gm.graph.nodes:
        target = node.target
        if node.op == "call_function" and type(target).__name__ in WRAPPERS:
            name = getattr(target, "__name__", "?").removeprefix("wrapped_")
            if name not in SAME:
                return f"Dynamo computes numpy's {name} of an array as torch does"
    return ""
