"""Nodes of autograd's graph, by name and place, outside of the public API.

Relies on the names of nodes, on `next_functions` and on the `variable` of nodes that
accumulate gradients (torch 2.11 and 2.13). If these differ, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: The number of nodes behind another node that count as near.
NEAR = 16


def nodes_near(node: Any) -> Iterator[Any]:
    """Yield a node and some nodes behind it, the near ones first."""
    found = [node]
    seen = {node}
    while found and len(seen) <= NEAR:
        node = found.pop(0)
        yield node
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                found.append(behind)


def gives_to(node: Any, p: torch.Tensor) -> int | None:
    """Return the output index of a node that is a gradient of a parameter, or None."""
    for at, (behind, _) in enumerate(node.next_functions):
        if getattr(behind, "variable", None) is p:
            return at
    return None


def is_lookup(node: Any) -> bool:
    """Is it the node of `torch.nn.functional.embedding`?"""
    return bool(node.name() == "EmbeddingBackward0")


def gradient_of_lookup(
    rows: torch.Tensor, indices: torch.Tensor, n: int, padding: int
) -> torch.Tensor:
    """Return the gradient of a matrix of n rows, as a lookup's node computes it."""
    made: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        rows, indices, n, padding, False
    )
    return made


__all__ = ["gives_to", "gradient_of_lookup", "is_lookup", "nodes_near"]
