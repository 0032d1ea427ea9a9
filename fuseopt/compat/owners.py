"""Find the optimizers whose step Dynamo traces."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from typing import Any

import torch

#: The attribute of a class whose objects are traced in place of optimizers, and step
#: all their `optimizers`.
STEPS = "_fuseopt_steps"
#: The file of torch's base class and of helpers such as `_get_value`.
HELPERS = inspect.getfile(torch.optim.Optimizer)


def optimizers_of(frame: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers that a frame's code refers to.

    These are its locals (one level of tuples deep, and the members of joint steps), its
    closure, and globals that it names.
    """
    seen = list(frame.f_locals.values())
    seen += [y for x in seen if type(x) is tuple for y in x]
    seen += [y for x in seen if getattr(type(x), STEPS, False) for y in x.optimizers]
    for cell in getattr(frame, "closure", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            seen.append(cell.cell_contents)
    seen += [frame.f_globals.get(name) for name in frame.f_code.co_names]
    return [x for x in seen if isinstance(x, torch.optim.Optimizer)]


def stepping() -> list[torch.optim.Optimizer]:
    """Return the optimizer with a method among the callers, as a list of one.

    [] if there is none, or if gradients are recorded.
    """
    if torch.is_grad_enabled():
        return []
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, torch.optim.Optimizer):
            return [owner]
        frame = frame.f_back
    return []


def among_callers() -> list[torch.optim.Optimizer]:
    """Return all optimizers that are arguments of callers, the nearest one first."""
    frame: types.FrameType | None = sys._getframe(1)
    found: dict[int, torch.optim.Optimizer] = {}
    while frame is not None:
        code, names = frame.f_code, frame.f_locals
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS)
        values = [names.get(name) for name in code.co_varnames[:count]]
        values += [names.get("self")]
        for value in values:
            for x in value if type(value) is tuple else (value,):
                if isinstance(x, torch.optim.Optimizer):
                    found.setdefault(id(x), x)
        frame = frame.f_back
    return [*found.values()]


def is_own(optimizer: torch.optim.Optimizer) -> bool:
    """Is an optimizer's class outside of torch?"""
    kinds = type(optimizer).__mro__
    inside = kinds[: kinds.index(torch.optim.Optimizer)]
    return not all(kind.__module__.startswith("torch.") for kind in inside)


def step_code(optimizer: torch.optim.Optimizer) -> types.CodeType | None:
    """Return the code of an optimizer's step, without its decorators."""
    return getattr(inspect.unwrap(type(optimizer).step), "__code__", None)


def is_step_of(code: types.CodeType, optimizer: torch.optim.Optimizer) -> bool:
    """Is it the code of an optimizer's step, or a copy of that code?"""
    own = step_code(optimizer)
    return own is not None and code == own and code.co_filename == own.co_filename


def is_helper(frame: Any) -> bool:
    """Is it one of the small functions that torch's optimizers share, by itself?"""
    code = frame.f_code
    return code.co_filename == HELPERS and not optimizers_of(frame)


def holds_others(optimizer: torch.optim.Optimizer) -> bool:
    """Does an optimizer hold others, whose steps its own may call?"""
    held = [*vars(optimizer).values()]
    held += [y for x in held if isinstance(x, (list, tuple)) for y in x]
    return any(isinstance(x, torch.optim.Optimizer) for x in held)
