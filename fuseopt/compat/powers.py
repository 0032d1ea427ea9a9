"""Keep symbolic the powers of numbers that a step reads or counts."""

from __future__ import annotations

import math
from typing import Any

import torch

from .layers import traces_for
from .names import find
from .patches import Hook, Patcher, patch
from .tracing import traces_step


def _power(x: float, y: float) -> float:
    """Compute `math.pow` in a form that Dynamo can keep symbolic."""
    power: float = float(x) ** float(y)
    return power


@patch(
    "symbolic-powers",
    "math.pow of a counter stays symbolic",
    "a step that calls math.pow of a counter is compiled anew at each value",
)
def POWERS(patcher: Patcher) -> None:
    """Keep the result symbolic, which Dynamo treats as a constant.

    Relies on its table of handlers.
    """
    VariableTracker = find("torch._dynamo.variables.base:VariableTracker")
    SymNodeVariable = find("torch._dynamo.variables.tensor:SymNodeVariable")
    in_graph = find("torch._dynamo.variables.torch:TorchInGraphFunctionVariable")
    handlers = in_graph._get_handlers()
    backend = patcher.backend

    def handle(original: Hook, _: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        symbolic = any(isinstance(x, SymNodeVariable) for x in args)
        if not symbolic or not traces_for(tx, backend):
            return original(_, tx, *args, **kwargs)
        function = VariableTracker.build(tx, _power)
        return tx.inline_user_function_return(function, list(args), kwargs)

    if math.pow not in handlers:
        patcher.handler(handlers, math.pow, handle)


@patch(
    "unchecked-powers",
    "a number that a step reads is the base of a power, whatever its sign",
    "a step with such a power may run in eager",
)
def UNCHECKED_POWERS(patcher: Patcher) -> None:
    """Omit the assertion that the base of a symbolic power is not negative.

    torch's symbolic `**` checks this, and torch 2.11 writes the check into the graph,
    which eager has not. For a negative base, the power is complex in Python and NaN
    here.
    """
    find("torch:SymFloat.__float_pow__")

    def power(original: Hook, self: Any, other: Any) -> Any:
        numbers = (int, float, torch.SymInt, torch.SymFloat)
        if traces_step() and isinstance(other, numbers):
            return self.__float_pow__(other)
        return original(self, other)

    patcher.around(torch.SymFloat, "__pow__", power, "self", "other")
