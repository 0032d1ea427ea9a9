"""Read a call of `foreach_map` as the calls that it makes.

Dynamo writes it as one node: a higher-order op with a graph, called on the
tensors of all lists. Eager runs that graph call by call. So its nodes take the place of
the node, and lanes of a map are lanes like those of a loop.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node

from ...compat import FOREACH_MAP


def inline(gm: GraphModule) -> bool:
    """Put the calls of each map into the graph of `gm`; return whether there are any.

    The code of `gm` is not recompiled.
    """
    if FOREACH_MAP is None:
        return False
    found = gm.graph.find_nodes(op="call_function", target=FOREACH_MAP)
    for node in found:
        _inline(gm, node)
    return bool(found)


def _inline(gm: GraphModule, node: Node) -> None:
    """Replace one node by the nodes of its graph."""
    body, *operands = node.args
    assert isinstance(body, Node), "Dynamo makes a graph of the function"
    inner = getattr(gm, str(body.target)).graph
    places = inner.find_nodes(op="placeholder")
    values: dict[Node, Any] = dict(zip(places, operands, strict=True))
    with gm.graph.inserting_before(node):
        for x in inner.nodes:
            if x.op not in ("placeholder", "output"):
                values[x] = gm.graph.node_copy(x, lambda y: values[y])
    (end,) = inner.find_nodes(op="output")
    results = end.args[0]
    for user in [*node.users]:
        assert user.target is operator.getitem, "a map returns a tuple"
        user.replace_all_uses_with(values[results[user.args[1]]])
        gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    if not body.users:
        gm.graph.erase_node(body)


__all__ = ["inline"]
