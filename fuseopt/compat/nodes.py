"""What of a graph of autograd's is not public API: its nodes, by name and place.

Relies on the names of nodes, on `next_functions` and on the `variable` of those that
accumulate gradients (torch 2.11 and 2.13). Where they are others, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Nodes behind another one that are near it.
NEAR = 16


def nodes_near(node: Any) -> Iterator[Any]:
    """A node and some of those behind it, the near ones first."""
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
    """At which place of what a node makes is a gradient of a parameter?"""
    for at, (behind, _) in enumerate(node.next_functions):
        if getattr(behind, "variable", None) is p:
            return at
    return None


def is_lookup(node: Any) -> bool:
    """Is a node that of `torch.nn.functional.embedding`?"""
    return bool(node.name() == "EmbeddingBackward0")


def gradient_of_lookup(
    rows: torch.Tensor, indices: torch.Tensor, n: int, padding: int
) -> torch.Tensor:
    """That of a matrix of n rows, as the node of a lookup makes it."""
    made: torch.Tensor = torch.ops.aten.embedding_dense_backward(
        rows, indices, n, padding, False
    )
    return made


__all__ = ["gives_to", "gradient_of_lookup", "is_lookup", "nodes_near"]
