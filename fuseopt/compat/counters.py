"""Have integers that a step counts stay symbols while Dynamo traces it."""

from __future__ import annotations

from typing import Any

import torch

from .tracing import tracing


def take_for_symbols(values: frozenset[int]) -> None:
    """Let Dynamo, in this thread and from now on, take these integers, where it finds
    them in the state of a parameter, for any numbers; nothing else may be one of them.
    """
    tracing.counted = values
    tracing.asks = False


def is_counted(value: object, name: str) -> bool:
    """Is an integer in the state of a parameter to be taken for any number?"""
    return (
        type(value) is int
        and value in tracing.counted
        and name.startswith("L['self'].state[")
    )


def stay_symbolic(gm: torch.fx.GraphModule, values: frozenset[int]) -> bool:
    """Is a graph the same whatever these numbers are?

    Relies on what Dynamo knows of the symbols of a graph; False where it is elsewhere.
    """
    if not values:
        return True
    if tracing.asks:
        return False
    for node in gm.graph.find_nodes(op="placeholder"):
        number = node.meta.get("example_value")
        if not isinstance(number, torch.SymInt):
            continue
        try:
            env: Any = number.node.shape_env
            expr = number.node.expr
            hint = number.node.hint
            asked = {x for guard in env.guards for x in guard.expr.free_symbols}
            replaced = env.replacements
        except AttributeError:
            return False
        if hint in values and (expr in asked or expr in replaced):
            return False
    return True
