"""Autograd's private API: which backward is running, and a callback at its end."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable

import torch
from torch.autograd import Variable
from torch.optim import Optimizer, optimizer

_task = getattr(torch._C, "_current_graph_task_id", None)
_engine = getattr(Variable, "_execution_engine", None)
_run = getattr(torch.autograd.graph, "_engine_run_backward", None)


def why_no_backward_is_known() -> str:
    """What this version of torch lacks by which a backward is known; "" if nothing."""
    if _task is None:
        return "torch._C._current_graph_task_id"
    if not hasattr(_engine, "queue_callback"):
        return "Variable._execution_engine.queue_callback"
    if _run is None:
        return "torch.autograd.graph._engine_run_backward"
    return ""


def backward_under_way() -> int:
    """A number of the backward that calls a hook; -1 outside of one."""
    return -1 if _task is None else int(_task())


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call something once all gradients of the backward under way have come; never,
    where it ends by an exception.
    """
    Variable._execution_engine.queue_callback(callback)


def is_nested() -> bool:
    """Was the backward under way begun by another one?

    Relies on the function of torch's that runs each. A thread of the engine's own was
    not begun by Python, and shows a backward only if that is within another.
    """
    threads = [sys._getframe()]
    allowed = 1
    if isinstance(threading.current_thread(), threading._DummyThread):
        # the one that began it may be in any thread
        allowed = 0
        if _backwards(threads[0]) <= allowed:
            allowed, threads = 1, [*sys._current_frames().values()]
    return any(_backwards(frame) > allowed for frame in threads)


def _backwards(frame: types.FrameType | None) -> int:
    n = 0
    while frame is not None:
        n += frame.f_code is getattr(_run, "__code__", None)
        frame = frame.f_back
    return n


def has_step_hooks(of: Optimizer) -> bool:
    """Do hooks of the user's run around a step?"""
    return bool(
        getattr(of, "_optimizer_step_pre_hooks", None)
        or getattr(of, "_optimizer_step_post_hooks", None)
        or getattr(optimizer, "_global_optimizer_pre_hooks", None)
        or getattr(optimizer, "_global_optimizer_post_hooks", None)
    )


__all__ = [
    "at_end_of_backward",
    "backward_under_way",
    "has_step_hooks",
    "is_nested",
    "why_no_backward_is_known",
]
