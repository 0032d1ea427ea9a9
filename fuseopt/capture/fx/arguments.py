"""Arguments of FX nodes: the numbers among them, and lists that are indices."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch.fx import Node

#: The functions whose second argument is an index.
INDEXING = frozenset({operator.getitem, operator.setitem})


def flatten(x: Any) -> list[Any]:
    """Return what lists, tuples and dicts hold, at any depth."""
    if isinstance(x, (list, tuple)):
        return [z for y in x for z in flatten(y)]
    if isinstance(x, dict):
        return [z for y in x.values() for z in flatten(y)]
    return [x]


def literals(nodes: Sequence[Node]) -> list[float]:
    """Return all literal numbers in the arguments of nodes."""
    return [
        x
        for node in nodes
        for x in flatten([node.args, node.kwargs])
        if isinstance(x, (int, float))
    ]


def without_lists(index: Any, make: Callable[[list[int]], Any]) -> Any:
    """Return an index with `make(x)` for each list x of integers in it.

    torch makes a tensor of such a list within its binding of `p[[0, 2]]`, where no mode
    intercepts it.
    """
    if type(index) is tuple:
        return tuple([without_lists(x, make) for x in index])
    if type(index) is list and all(type(x) is int for x in index):
        return make(index)
    return index
