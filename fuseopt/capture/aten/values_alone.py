"""Decompositions of which eager computes the values alone.

`eigvalsh`, `svdvals`, and the norms that call these compute no vectors. While a step is
recorded, ATen computes them all the same. LAPACK then goes another way, and its values
have other bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import CaptureError

#: Names of the functions and methods that compute values alone in eager.
FUNCTIONS = frozenset(
    "linalg_eigvalsh linalg_eigvals linalg_svdvals linalg_matrix_norm linalg_norm "
    "linalg_cond linalg_matrix_rank norm nuclear_norm".split()
)
#: The ops that they call while they are recorded, each with its argument for vectors.
VECTORS = {
    torch.ops.aten._linalg_eigh.default: "compute_v",
    torch.ops.aten._linalg_svd.default: "compute_uv",
}


def called(node: torch.fx.Node) -> str:
    """Return the name of the function or method that a node calls."""
    name = str(getattr(node.target, "__name__", node.target))
    given = dict(zip(("input", "some", "compute_uv"), node.args, strict=False))
    if name == "svd" and not {**given, **node.kwargs}.get("compute_uv", True):
        return "linalg_svdvals"
    return name


def without_vectors(
    function: str, func: Any, bound: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the keywords of op `func` for values alone, beside its matrix; None if
    its own arguments are eager's. `function`: what the step calls.
    """
    if function not in FUNCTIONS:
        return None
    if func is torch.ops.aten.linalg_eig.default:
        raise CaptureError("torch computes vectors beside these values in a trace")
    if func not in VECTORS:
        return None
    return {**{k: v for k, v in bound.items() if k != "A"}, VECTORS[func]: False}
