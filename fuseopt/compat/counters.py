"""Keep symbolic the integers that a step counts, while Dynamo traces it."""

from __future__ import annotations

from typing import Any

import torch

from .tracing import tracing


def take_for_symbols(values: frozenset[int]) -> None:
    """Make Dynamo treat these integers as symbols, in this thread and from now on.

    That holds where Dynamo finds them in the state of a parameter; no other number may
    be equal to one of them.
    """
    tracing.counted = values
    tracing.restricted = False


def is_counted(value: object, name: str) -> bool:
    """Is an integer in the state of a parameter to be treated as a symbol?"""
    return (
        type(value) is int
        and value in tracing.counted
        and name.startswith("L['self'].state[")
    )


def stay_symbolic(gm: torch.fx.GraphModule, values: frozenset[int]) -> bool:
    """Is a graph the same for any values of these numbers?

    Relies on Dynamo's facts about the symbols of a graph; False if these are elsewhere.
    """
    if not values:
        return True
    if tracing.restricted:
        return False
    for node in gm.graph.find_nodes(op="placeholder"):
        number = node.meta.get("example_value")
        if not isinstance(number, torch.SymInt):
            continue
        try:
            env: Any = number.node.shape_env
            expr = number.node.expr
            hint = number.node.hint
            guarded = {x for guard in env.guards for x in guard.expr.free_symbols}
            replaced = env.replacements
        except AttributeError:
            return False
        if hint in values and (expr in guarded or expr in replaced):
            return False
    return True


def free_symbols(size: torch.SymInt) -> frozenset[Any]:
    """Return the symbols in a size; the size itself if torch does not report them."""
    try:
        return frozenset(size.node.expr.free_symbols)
    except AttributeError:
        return frozenset({id(size)})
