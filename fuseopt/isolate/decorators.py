"""Take the decorators off a step's function, and put them around another function.

torch puts two around each of its steps. One calls hooks and notifies profilers, the
other sets the grad mode. Together they take longer than a small step. Without hooks and
profilers, cheaper equivalents run in their place.
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
    """Return the cells of a function's closure."""
    return getattr(function, "__closure__", None) or ()


def _holds(cell: Any, value: object) -> bool:
    try:
        return cell.cell_contents is value
    except ValueError:  # an empty cell
        return False


def peel(function: Any) -> tuple[list[Any], Any]:
    """Return the decorators around a function, outermost first, and the function.

    A layer is a decorator if it was made with functools.wraps and calls the wrapped
    function through its closure. `rewrap` can replace that.
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
    """Return a copy of a function with a new code object and other cells."""
    code = function.__code__.replace()
    copy = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    del copy.__wrapped__  # type: ignore[attr-defined]
    return copy


def leading(function: Any) -> Any:
    """Return a new function that runs a step under Dynamo.

    It raises NotTraced if Dynamo does not trace it: only a shadow would step.
    """

    def lead(self: Optimizer) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            raise NotTraced
        return function(self)

    return copied(lead, cells(lead))


def rewrap(layer: Any, old: Any, new: Any, alone: Any) -> tuple[Any, Any]:
    """Return `layer` around `new` in place of `old`, and around `alone`.

    `alone` does the same as `new`, and may be called where the step is not traced or
    profiled. A layer that is not torch's is put around `new` in both cases.
    """
    closure = tuple(types.CellType(new) if _holds(c, old) else c for c in cells(layer))
    wrapped = copied(layer, closure)
    by_itself = wrapped
    if layer.__code__ is compat.GRAD_MODE:
        by_itself = _grad_mode(alone)
        by_itself.by_option = getattr(alone, "by_option", None) is False or None
    elif layer.__code__ is compat.PROFILED:
        by_itself = alone
        quick = getattr(new, COMPILED).quick
        quick.by_option = getattr(alone, "by_option", None)
        wrapped = functools.update_wrapper(_profiled(wrapped, alone, quick), layer)
    wrapped.__wrapped__ = new
    setattr(wrapped, COMPILED, getattr(new, COMPILED))
    return wrapped, by_itself


def _profiled(theirs: Any, alone: Any, quick: Any) -> Any:
    """Return torch's layer for hooks and profilers, skipped while there are none.

    `quick`: repeats the last call, without the layers inside.
    """

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        # Dynamo evaluates this to True
        if torch.compiler.is_dynamo_compiling():
            return theirs(self, *args, **kwargs)
        repeat = quick.step
        if repeat is not None and not args and not kwargs and repeat(self):
            result = None
        elif not compat.undisturbed(self):
            return theirs(self, *args, **kwargs)
        else:
            result = alone(self, *args, **kwargs)
        self._optimizer_step_code()  # a marker for profilers that trace Python
        return result

    return step


def _grad_mode(alone: Any) -> Any:
    """Return torch's layer that sets the grad mode to the option `differentiable`."""

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before, wanted = torch.is_grad_enabled(), self.defaults["differentiable"]
        compat.GRAD_SWITCH(wanted)
        try:
            return alone(self, *args, **kwargs)
        finally:
            compat.GRAD_SWITCH(before)

    return step
