"""Function of an optimizer's step, the layers around it, and its state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..isolate.compile import compile_bound, compiler_of
from ..isolate.decorators import cells, peel

#: Files of layers around a step that a tail may leave out, since it does their work.
_LAYERS = frozenset(
    {
        compat.PROFILED.co_filename,
        torch.optim.lr_scheduler.__file__,
        compile_bound.__code__.co_filename,
        peel.__code__.co_filename,
        torch.compiler.disable(lambda: None).__code__.co_filename,  # type: ignore
    }
)


def has_gradients(optimizer: Optimizer) -> bool:
    """Has any parameter a gradient?"""
    return any(
        p.grad is not None for group in optimizer.param_groups for p in group["params"]
    )


def has_state(optimizer: Optimizer) -> bool:
    """Has every parameter with a gradient a state?"""
    return all(
        optimizer.state.get(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    )


def function_of(optimizer: Optimizer) -> tuple[Any, str]:
    """Return the function of an optimizer's step without the layers around it. Return
    the reason why a caller may not leave these out, or "".
    """
    step: Any = optimizer.step
    layers, inner = peel(getattr(step, "__func__", step))
    for layer in layers:
        if layer.__code__.co_filename not in _LAYERS and not _records_nothing(layer):
            place = f"{layer.__code__.co_filename}:{layer.__code__.co_firstlineno}"
            return (
                inner,
                f"the step of {type(optimizer).__name__} is wrapped by {place}",
            )
    isolated = compiler_of(step)
    if isolated is not None:
        inner = isolated.function
    if not hasattr(inner, "__code__"):
        return inner, f"the step of {type(optimizer).__name__} is not a Python function"
    return inner, ""


def _records_nothing(layer: Any) -> bool:
    """Is a layer the decorator `torch.no_grad()`? All of a tail runs without grad."""
    if layer.__code__ != compat.DECORATED:
        return False
    closure_values = [cell.cell_contents for cell in cells(layer)]
    return any(
        isinstance(getattr(x, "__self__", x), torch.no_grad) for x in closure_values
    )


@contextlib.contextmanager
def marks(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Record the steps for profilers, as `Optimizer.step` does."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            if not compat.undisturbed(optimizer):
                name = f"Optimizer.step#{type(optimizer).__name__}.step"
                mark = torch.autograd.profiler.record_function(name)
                stack.enter_context(mark)
        yield
