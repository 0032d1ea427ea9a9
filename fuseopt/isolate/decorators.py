"""The decorators around a step's function: taken off, and put around another function.

torch puts two around each of its steps. One calls hooks and tells profilers, the other
sets the grad mode; both cost more than a small step where neither has anything to do.
Then what is put around does as much with less, and theirs runs where anyone looks.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.session import COMPILED
from ..shadow.whole import NotTraced


def cells(function: Any) -> tuple[Any, ...]:
    """What a function closes over."""
    return getattr(function, "__closure__", None) or ()


def _holds(cell: Any, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def peel(function: Any) -> tuple[list[Any], Any]:
    """The decorators around a function, outermost first, and the function.

    A layer counts as one if it was made with functools.wraps and calls what it wraps
    through its closure, so that `rewrap` can give it another function to call.
    """
    layers = []
    while isinstance(function, types.FunctionType):
        inner = getattr(function, "__wrapped__", None)
        if not isinstance(inner, types.FunctionType):
            break
        if not any(_holds(cell, inner) for cell in cells(function)):
            break
        layers.append(function)
        function = inner
    return layers, function


def copied(function: Any, closure: tuple[Any, ...]) -> Any:
    """The same function with a code object of its own and other cells."""
    code = function.__code__.replace()
    made = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    return made


def leading(function: Any) -> Any:
    """A function of its own that does a step which Dynamo traces, and nothing else.

    Raises NotTraced where Dynamo lets it run as it is: only a shadow would step.
    """

    def lead(self: Optimizer) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NotTraced
        return function(self)

    return copied(lead, cells(lead))


def rewrap(layer: Any, old: Any, new: Any, alone: Any) -> tuple[Any, Any]:
    """The decorator `layer` around `new` in place of `old`; and around `alone`.

    `alone` does what `new` does, and may be called where nobody traces the step or
    looks at what it calls. A layer of which nothing is known is around `new` alone.
    """
    closure = tuple(types.CellType(new) if _holds(c, old) else c for c in cells(layer))
    made = copied(layer, closure)
    by_itself = made
    if layer.__code__ is compat.GRAD_MODE:
        by_itself = _grad_mode(alone)
    elif layer.__code__ is compat.PROFILED:
        by_itself = alone
        made = functools.update_wrapper(_profiled(made, alone), layer)
    made.__wrapped__ = new
    setattr(made, COMPILED, getattr(new, COMPILED))
    return made, by_itself


def _profiled(theirs: Any, alone: Any) -> Any:
    """torch's layer for hooks and profilers, where there are none of either."""

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Dynamo takes the first for True
        if torch.compiler.is_dynamo_compiling() or not compat.undisturbed(self):
            return theirs(self, *args, **kwargs)
        done = alone(self, *args, **kwargs)
        self._optimizer_step_code()  # its place, for profilers that trace Python
        return done

    return step


def _grad_mode(alone: Any) -> Any:
    """torch's layer that lets the grad mode be what `differentiable` says."""

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        known, wanted = torch.is_grad_enabled(), self.defaults["differentiable"]
        compat.GRAD_SWITCH(wanted)
        try:
            return alone(self, *args, **kwargs)
        finally:
            compat.GRAD_SWITCH(known)

    return step
