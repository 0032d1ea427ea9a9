"""Plan graphs with one node, a function of tensors, without Dynamo."""

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
    """Return a graph that calls `function`, which writes to its arguments. `names` are
    the names of these.

    The capture of the graph runs the function on tensors without contents.
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
    """Return `plan(args)`, the program of a graph. An error inside fuseopt is reported,
    with the text `instead` on what happens, and raised as LanesDiffer.
    """
    try:
        return plan(args)
    except Exception as error:
        if not internal_errors.is_mishap(error):
            raise
        message = internal_errors.report(error, gm, args, config, instead)
        raise LanesDiffer(message) from error
