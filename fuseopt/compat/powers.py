"""Have Dynamo keep powers of numbers that a step reads or counts symbolic."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .dynamo import leads_to
from .tracing import traces_step


def _power(x: float, y: float) -> float:
    """`math.pow`, in what Dynamo can keep symbolic."""
    power: float = float(x) ** float(y)
    return power


def trace_power(backend: Callable[..., Any]) -> None:
    """Let `math.pow` of a counter stay symbolic where Dynamo traces for `backend`.

    Dynamo takes the result for a constant and compiles anew at each value. Relies on
    its table of handlers; where there is none, that is what happens.
    """
    try:
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.tensor import SymNodeVariable
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        handlers: Any = TorchInGraphFunctionVariable._get_handlers()
    except (ImportError, AttributeError):
        return

    def handle(_: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        symbolic = any(isinstance(x, SymNodeVariable) for x in args)
        if not symbolic or not leads_to(tx.output.compiler_fn, backend):
            return None  # as ever
        function = VariableTracker.build(tx, _power)
        return tx.inline_user_function_return(function, list(args), kwargs)

    handlers.setdefault(math.pow, handle)


def power_unchecked() -> None:
    """Let a number that a step reads be the base of a power, whatever its sign.

    torch's symbolic `**` asks that the base is not negative, and torch 2.11 writes what
    it asked into the graph, as an assertion that eager has not. Where the base is
    negative, the power is complex in Python and NaN here. Relies on the method that
    asks and on the one that it calls (torch 2.11.0, 2.13.0); where they are others, a
    step with such an assertion runs in eager.
    """
    theirs = getattr(torch.SymFloat, "__pow__", None)
    if theirs is None or not hasattr(torch.SymFloat, "__float_pow__"):
        return

    @functools.wraps(theirs)
    def power(self: Any, other: Any) -> Any:
        numbers = (int, float, torch.SymInt, torch.SymFloat)
        if traces_step() and isinstance(other, numbers):
            return self.__float_pow__(other)
        return theirs(self, other)

    torch.SymFloat.__pow__ = power  # type: ignore[method-assign]
