"""Arithmetic on numpy's arrays, which Dynamo does with torch.

Dynamo takes an array for a tensor, and each function of numpy's for one of
torch._numpy, which calls torch. What only moves elements has numpy's bits. A sum has
another order, and exp, pow and the like are other functions.
"""

from __future__ import annotations

import operator

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
    """Return arithmetic on arrays whose bits are not numpy's, "" if there is none."""
    for node in gm.graph.nodes:
        name = ""
        if _wraps(node):
            name = getattr(node.target, "__name__", "?").removeprefix("wrapped_")
        elif node.target in (abs, operator.abs) and any(map(_is_array, node.args)):
            name = "functions"  # Dynamo goes on with the result as with a tensor
        if name and name not in SAME:
            return f"Dynamo computes numpy's {name} of an array as torch does"
    return ""


def _wraps(node: torch.fx.Node) -> bool:
    """Does a node stand for a function, a method or an operator of numpy's?"""
    return node.op == "call_function" and type(node.target).__name__ in WRAPPERS


def _is_array(x: object) -> bool:
    """Is a value an array in Python? `t.numpy()` is `t.view_as(t)` in a graph."""
    if not isinstance(x, torch.fx.Node):
        return False
    source = getattr(x.meta.get("grapharg"), "source", None)
    viewed = x.target == "view_as" and len({*x.args}) == 1
    attribute = getattr(x.target, "__name__", "") == "numpy_attr_wrapper"
    given = type(source).__name__ == "NumpyTensorSource"
    return _wraps(x) or viewed or attribute or given
