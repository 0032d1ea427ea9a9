"""What is set in a thread while Dynamo traces a step; how an interrupt is mended."""

from __future__ import annotations

import inspect
import sys
import threading
import types
from typing import Any

import torch


class Tracing(threading.local):
    """What was set for the trace that runs in this thread, for one thread alone.

    `patches`: what is to be taken back when it ends. `own`: is the step that of an
    optimizer that is not torch's? `owners`: whose steps they are. `counted`: integers
    that are to be symbols. `constants`: are numbers constants, as Dynamo has them?
    `symbols`: where the numbers are found that the trace has as symbols. `groups_kept`:
    is an optimizer's method being traced that is to leave groups as they are? `as_if`:
    how many steps run, one within the other, as if they were compiled? `cuts`: where
    Dynamo ends graphs, while somebody wants to know.
    """

    def __init__(self) -> None:
        self.patches: list[Any] = []
        self.own = False
        self.owners: list[torch.optim.Optimizer] = []
        self.counted: frozenset[int] = frozenset()
        self.constants = False
        self.symbols: list[str] = []
        self.groups_kept = False
        self.as_if = 0
        self.cuts: list[Any] | None = None


tracing = Tracing()


def traces_step() -> bool:
    """Is Dynamo, in this thread, tracing code of an optimizer's step?"""
    return bool(tracing.patches)


def traces_own() -> bool:
    """Is it the step of an optimizer that is not torch's own?"""
    return tracing.own and traces_step()


def leave() -> None:
    """Take back what was set for a trace of this thread, which has ended."""
    tracing.owners = []
    while tracing.patches:
        tracing.patches.pop().__exit__(None, None, None)


def settle() -> None:
    """Put right what an interrupt has left of a compilation that nobody goes on with.

    Dynamo counts the compilations that are under way, and calls whoever wants to know
    of the first alone: an interrupt while it counts back would end that for ever, and
    `torch._dynamo.reset()` would raise. To be called under Dynamo's lock. Relies on the
    name of that count; where it has another, nothing is put right.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.callback import callback_handler

    trace = getattr(convert_frame, "_compile", None)
    if trace is None:
        return
    code = inspect.unwrap(trace).__code__
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            return  # one is under way, and this is within it
        frame = frame.f_back
    name = "_CompilationCallbackHandler__pending_callbacks_counter"
    if getattr(callback_handler, name, 0):
        setattr(callback_handler, name, 0)
    leave()
