"""Calls of a graph that have no kernel: eager raises there, and a step may catch it.

Dynamo runs a step on fake tensors, which take any dtype. So a trace never goes the way
that `except` begins.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

#: LAPACK has no kernels for these.
_HALVES = (torch.bfloat16, torch.float16)


def missing_kernel(gm: torch.fx.GraphModule) -> str:
    """Return the error of the first call of `torch.linalg` that lacks a kernel."""
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if node.op != "call_function" or not name.startswith("linalg_"):
            continue
        found = [x.meta.get("example_value") for x in node.all_input_nodes]
        tensors = [x for x in found if isinstance(x, torch.Tensor)]
        if not tensors or tensors[0].device.type != "cpu":
            continue
        dtype = tensors[0].dtype
        if dtype in _HALVES and (why := _refused(node.target, len(tensors), dtype)):
            return why
    return ""


@functools.cache
def _refused(function: Any, tensors: int, dtype: torch.dtype) -> str:
    """Return the message with which a function refuses a dtype; "" if it does not."""
    matrix = torch.ones(1, 1, dtype=dtype, device="cpu")
    try:
        with torch.no_grad():
            function(*[matrix] * tensors)
    except NotImplementedError as error:
        return str(error)
    except (RuntimeError, TypeError):
        # it needs other arguments
        return ""
    return ""
