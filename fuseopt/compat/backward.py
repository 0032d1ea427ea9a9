"""Private API of autograd: the running backward, and a callback at its end."""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .capability import probed
from .names import Missing, find


@probed(
    "backwards",
    "fuseopt sees which backward runs, and when it ends",
    "fuseopt.in_backward raises an error; steps after the backward are as before",
)
def BACKWARDS() -> None:
    task = find("torch._C:_current_graph_task_id")
    find("torch.autograd:Variable._execution_engine.queue_callback")
    find("torch.autograd.graph:_engine_run_backward")
    if torch.is_grad_enabled() and task() == -1:
        seen: list[int] = []
        x: Any = torch.zeros(1, device="cpu", requires_grad=True)
        x.register_hook(lambda _: seen.append(task()))
        (x * 1).sum().backward()
        if seen == [-1] or not seen:
            raise Missing("torch._C._current_graph_task_id says nothing in a backward")


def why_no_backward_is_known() -> str:
    """Return why this torch does not report the running backward; "" if it does."""
    return BACKWARDS.missing()


def backward_under_way() -> int:
    """Return a number of the backward that calls a hook; -1 outside of one."""
    task = _task()
    return -1 if task is None else int(task())


@functools.cache
def _task() -> Any:
    return find("torch._C:_current_graph_task_id", None)


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function once all gradients of the running backward have arrived.

    If the backward ends by an exception, the function is never called.
    """
    find("torch.autograd:Variable._execution_engine").queue_callback(callback)


def is_nested() -> bool:
    """Did another backward begin the running one?

    Relies on torch's function that runs each backward. A thread of the engine was not
    begun by Python, and shows a backward only if that is nested.
    """
    threads = [sys._getframe()]
    allowed = 1
    if isinstance(threading.current_thread(), threading._DummyThread):
        # the outer backward may be in any thread
        allowed = 0
        if _backwards(threads[0]) <= allowed:
            allowed, threads = 1, [*sys._current_frames().values()]
    return any(_backwards(frame) > allowed for frame in threads)


def _backwards(frame: types.FrameType | None) -> int:
    n, run = 0, find("torch.autograd.graph:_engine_run_backward", None)
    while frame is not None:
        n += frame.f_code is getattr(run, "__code__", None)
        frame = frame.f_back
    return n


@probed(
    "counted-owners",
    "a gradient that nobody else holds is freed within the backward",
    "fuseopt.in_backward frees gradients after the backward",
)
def OWNERS() -> None:
    find("torch:Tensor._use_count")
    find("torch._C:_storage_Use_Count")


def has_one_owner(t: torch.Tensor) -> bool:
    """Is one C++ object the only owner of a tensor, besides its caller?

    No other tensor may have its memory. Call this with a variable that is the caller's
    only name for the tensor. False if torch does not count references.
    """
    expected = _counted_of_gradient()
    return expected is not None and _counted(t) == expected


def _counted(t: torch.Tensor) -> tuple[int, int, int]:
    storage = t.untyped_storage()
    return (
        t._use_count(),  # type: ignore[attr-defined]
        find("torch._C:_storage_Use_Count")(storage._cdata),
        sys.getrefcount(t),
    )


@functools.cache
def _counted_of_gradient() -> tuple[int, int, int] | None:
    """Return the reference counts of a tensor that a parameter and a caller own."""
    if not OWNERS.available():
        return None
    owner = torch.zeros(1, requires_grad=True)
    owned = torch.zeros(1)
    owner.grad = owned
    return _exact_counts(owned)


def _exact_counts(t: torch.Tensor) -> tuple[int, int, int]:
    return _counted(t)  # counted at the same call depth as in `has_one_owner`


def has_step_hooks(of: Optimizer) -> bool:
    """Are there hooks of the user around a step?"""
    return bool(
        getattr(of, "_optimizer_step_pre_hooks", None)
        or getattr(of, "_optimizer_step_post_hooks", None)
        or find("torch.optim.optimizer:_global_optimizer_pre_hooks", None)
        or find("torch.optim.optimizer:_global_optimizer_post_hooks", None)
    )


def has_state_hooks(of: Optimizer) -> bool:
    """Can hooks of an optimizer's state dicts be registered?

    A class that wraps an optimizer may not call `Optimizer.__init__`.
    """
    return hasattr(of, "_optimizer_load_state_dict_pre_hooks")


__all__ = [
    "at_end_of_backward",
    "backward_under_way",
    "has_one_owner",
    "has_state_hooks",
    "has_step_hooks",
    "is_nested",
    "why_no_backward_is_known",
]
