"""Keep a step's arithmetic on numbers in the order of the step.

Dynamo represents a symbolic number by a formula of real numbers, which sympy
simplifies. Before it compiles a graph, a pass merges nodes with equal formulas:
`float(n) - 1e16 + 1e16` becomes `float(n)`. Floats are no real numbers, so that this
changes bits. The pass serves assertions of the step on numbers read from tensors;
fuseopt omits it if there is no such assertion.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from .names import Missing, find
from .outcomes import SYMBOLS
from .patches import Hook, Patcher, patch
from .tracing import traces_step


@patch(
    "order-of-arithmetic",
    "arithmetic of numbers is computed in the order in which a step has it",
    "steps that compute with numbers that move run in eager",
    bits=True,
)
def ORDER(patcher: Patcher) -> None:
    """Omit the pass that merges nodes with equal formulas."""
    home = find("torch._dynamo.output_graph")
    outputs = find("torch._dynamo.output_graph:OutputGraph.compile_and_call_fx_graph")
    if "insert_deferred_runtime_asserts" not in outputs.__code__.co_names:
        raise Missing("compile_and_call_fx_graph calls another pass")

    def insert(
        original: Hook, gm: Any, shape_env: Any, *args: Any, **named: Any
    ) -> Any:
        if traces_step() and not shape_env.deferred_runtime_asserts:
            return None
        return original(gm, shape_env, *args, **named)

    name = "insert_deferred_runtime_asserts"
    patcher.around(home, name, insert, "gm", "shape_env")


#: Operations on symbols that stay exact although nodes with equal formulas are merged.
EXACT = (operator.neg, operator.pos, torch.sym_float, torch.sym_int)


def computes_with_symbols(gm: torch.fx.GraphModule) -> bool:
    """Does a graph compute a number from others, by more than a change of sign?"""
    return any(
        node.op == "call_function"
        and isinstance(node.meta.get("example_value"), SYMBOLS)
        and node.target not in EXACT
        for node in gm.graph.nodes
    )
