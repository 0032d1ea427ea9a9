"""Graphs with one node, a function of tensors, that are planned without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..capture.fx.interpreter import OWN
from ..compiler import internal_errors
from ..config import Config
from ..inputs.keys import LanesDiffer


def one_node(function: Callable[..., None], names: Sequence[str]) -> GraphModule:
    """A graph that calls `function`, which writes to its arguments. `names`: of these.

    The function is run on tensors without contents when the graph is captured.
    """
    setattr(function, OWN, True)
    graph = Graph()
    graph.call_function(function, tuple(map(graph.placeholder, names)))
    graph.output(())
    return GraphModule(torch.nn.Module(), graph)


def planned(
    plan: Callable[[Sequence[Any]], Any],
    gm: GraphModule,
    args: Sequence[Any],
    config: Config,
    instead: str,
) -> Any:
    """`plan(args)`, the program of a graph. An error of fuseopt's own is reported, with
    what happens `instead`, and raised as LanesDiffer.
    """
    try:
        return plan(args)
    except Exception as error:
        if not internal_errors.is_mishap(error):
            raise
        message = internal_errors.tell(error, gm, args, config, instead)
        raise LanesDiffer(message) from error
