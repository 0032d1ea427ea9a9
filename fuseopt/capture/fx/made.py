"""Tensors that a node of Dynamo's graph makes, by the example that Dynamo keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ... import compat


def makes_tensors(node: Node) -> bool:
    """Is a tensor among the results of a node? False if Dynamo kept no example."""
    return any(True for _ in _tensors(node.meta.get("example_value")))


def moving_size(node: Node) -> bool:
    """Does a size or a place in memory of a node's result depend on a number?

    Dynamo writes such a size as a symbol. It also writes a size of the step's tensors
    as one, if that differs between calls.
    """
    found = _symbols(_tensors(node.meta.get("example_value")))
    return bool(found and found - _sizes_of_inputs(node.graph))


def _sizes_of_inputs(graph: Graph) -> set[Any]:
    """Return the symbols in the sizes of a graph's tensors."""
    inputs = (n for n in graph.nodes if n.op in ("placeholder", "get_attr"))
    examples = [n.meta.get("example_value") for n in inputs]
    return _symbols(_tensors(examples))


def _symbols(tensors: Iterable[torch.Tensor]) -> set[Any]:
    """Return the symbols in the sizes and places of tensors."""
    found: set[Any] = set()
    for t in tensors:
        for x in (*t.shape, *t.stride(), t.storage_offset()):
            if isinstance(x, torch.SymInt):
                found |= compat.free_symbols(x)
    return found


def has_size_of_example(node: Node, result: Any) -> bool:
    """Has a result of numbers alone the sizes that Dynamo found?

    Numbers may cancel out in a size, or Dynamo may have fixed one. A stand-in gives
    another size then.
    """
    examples = [t.shape for t in _tensors(node.meta.get("example_value"))]
    return not examples or examples == [t.shape for t in _tensors(result)]


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        if x.layout is torch.strided:
            yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)
