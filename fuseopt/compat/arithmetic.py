"""Keep a step's arithmetic of numbers in the order in which the step has it.

Dynamo notes what a symbolic number is as a formula of real numbers, which sympy
simplifies. Before it compiles a graph, a pass lets nodes with equal formulas be one:
`float(n) - 1e16 + 1e16` becomes `float(n)`. Floats are no real numbers, so that this
changes bits. The pass is there for what a step has asserted of numbers that it read
from tensors; without such an assertion it is left out.
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
    """Leave out the pass that lets nodes with equal formulas be one."""
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


#: What a graph may do to a symbol where nodes with equal formulas are one.
EXACT = (operator.neg, operator.pos, torch.sym_float, torch.sym_int)


def computes_with_symbols(gm: torch.fx.GraphModule) -> bool:
    """Does a graph compute a number of others, by more than a change of sign?"""
    return any(
        node.op == "call_function"
        and isinstance(node.meta.get("example_value"), SYMBOLS)
        and node.target not in EXACT
        for node in gm.graph.nodes
    )
