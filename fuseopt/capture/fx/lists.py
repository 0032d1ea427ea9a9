"""Call foreach functions as eager's optimizers do: on lists of one device and dtype.

torch's optimizers group their tensors, but not while Dynamo traces them. On the CPU the
bits are the same. On a GPU, a call on a mixed list takes one tensor at a time, and
divides by a number otherwise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

Call = Callable[..., Any]


def is_foreach(target: Any) -> bool:
    """Is this one of torch's functions of lists?"""
    return getattr(target, "__name__", "").startswith("_foreach_")


def by_group(function: Call, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a foreach function on the tensors of each device and dtype; the results in
    the order of the lists.
    """
    lists = [x for x in (*args, *kwargs.values()) if isinstance(x, (list, tuple))]
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(zip(*lists, strict=False)):
        key = tuple((x.device, x.dtype) for x in row if isinstance(x, torch.Tensor))
        groups.setdefault(key, []).append(i)
    n = sum(map(len, groups.values()))
    if len(groups) < 2 or any(len(x) != n for x in lists):
        return function(*args, **kwargs)
    results: list[Any] = [None] * n
    for members in groups.values():
        some = functools.partial(_some, members)
        got = function(*map(some, args), **{k: some(v) for k, v in kwargs.items()})
        for i, result in zip(members, got or (), strict=False):
            results[i] = result
    return tuple(results)


def _some(members: Sequence[int], x: Any) -> Any:
    return [x[i] for i in members] if isinstance(x, (list, tuple)) else x


def grouped(gm: GraphModule) -> GraphModule:
    """The graph, whose foreach calls are made by group if it has tensors on a GPU."""
    if not any(is_foreach(n.target) and _on_gpu(n.args) for n in gm.graph.nodes):
        return gm
    graph = Graph()
    result = graph.graph_copy(gm.graph, {})
    for node in graph.nodes:
        if node.op == "call_function" and is_foreach(node.target):
            node.target = _in_groups(node.target)
    graph.output(result)
    return GraphModule(gm, graph)


@functools.cache
def _in_groups(function: Call) -> Call:
    def called(*args: Any, **kwargs: Any) -> Any:
        return by_group(function, args, kwargs)

    called.__name__ = called.__qualname__ = f"grouped{function.__name__}"
    return called


def _on_gpu(args: Any) -> bool:
    first = args[0] if args else None
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    example = getattr(first, "meta", {}).get("example_value")
    return isinstance(example, torch.Tensor) and example.device.type == "cuda"
