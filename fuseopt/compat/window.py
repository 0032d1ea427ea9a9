"""The time in which fuseopt traces: Dynamo begins, hooks are in force, Dynamo ends.

Dynamo calls whoever asked for it when it begins to trace and when it has ended, under
the lock that it traces under. In between, where it traces for fuseopt, all hooks of
patches.py are in force; other threads that want to trace wait for the lock. At any
other time torch is as it was imported.

`torch._dynamo.reset()` forgets who asked, and an interrupt may spoil Dynamo's count of
traces, so that nobody is called. Then the backend gets a graph that was traced without
hooks: it asks again, and has Dynamo begin that trace anew.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch

from .capability import probed
from .contexts import scalar_outputs
from .gc_pause import collector_paused
from .gradients import Apart
from .layers import leads_to
from .leaving import ends_pass, leave_to_eager
from .names import find, takes
from .owners import (
    STEPS,
    holds_others,
    is_helper,
    is_own,
    is_step_of,
    optimizers_of,
    stepping,
)
from .patches import patches
from .tracing import tracing

#: In this attribute of its handler Dynamo counts the traces that are under way.
COUNT = "_CompilationCallbackHandler__pending_callbacks_counter"


@probed(
    "trace-callbacks",
    "Dynamo says when a trace begins and ends",
    "no hook is ever in force: steps are compiled as any backend compiles them",
)
def TRACE_CALLBACKS() -> None:
    handler = find("torch._dynamo.callback:callback_handler")
    takes(handler.register_start_callback, "self", "callback")
    takes(handler.register_end_callback, "self", "callback")
    find("torch._dynamo.convert_frame:_compile")
    takes(find("torch._dynamo.convert_frame:compile_frame"), "code", "globals")


patches.needs = (TRACE_CALLBACKS,)


class Window:
    """Follows Dynamo's traces for one backend.

    check: called with each optimizer whose step Dynamo begins to trace; an exception
    reaches the caller of the step before anything ran. keep: the reason why code that
    holds an optimizer is to run in eager, or "".
    """

    def __init__(
        self,
        backend: Callable[..., Any],
        check: Callable[[torch.optim.Optimizer], None],
        keep: Callable[[torch.optim.Optimizer], str],
    ) -> None:
        self.backend = backend
        self.check = check
        self.keep = keep
        # a callback may run while Dynamo is tracing: it must not trace this too
        disable: Any = torch.compiler.disable
        self._began, self._ended = disable(self._begin), disable(self._end)
        self._handler: Any = None

    def ask(self) -> None:
        """Ask Dynamo to say when traces begin and end, if it does not yet."""
        if not (TRACE_CALLBACKS.there or TRACE_CALLBACKS.available()):
            return
        handler = self._handler
        if handler is None:
            handler = find("torch._dynamo.callback:callback_handler")
            self._handler = handler
        try:
            if self._began not in handler.start_callbacks:
                handler.register_start_callback(self._began)
            if self._ended not in handler.end_callbacks:
                handler.register_end_callback(self._ended)
        except (AttributeError, TypeError) as error:
            TRACE_CALLBACKS.broke(error)

    def __enter__(self) -> None:
        """Around a call of what Dynamo compiles: it may trace."""
        self.ask()

    def __exit__(self, *_: object) -> None:
        if tracing.hooked is not None:
            settle_interrupted()

    def _begin(self, notice: Any) -> None:
        """Dynamo begins a trace: put hooks in force, if it is for this backend."""
        names = _trace()
        frame = names.get("frame")
        if frame is None and _is_of_a_frame(notice):
            TRACE_CALLBACKS.lack("Dynamo does not say which code it traces")
        elif frame is not None and leads_to(names["compiler_fn"], self.backend):
            self._follow(frame, notice)

    def _follow(self, frame: Any, notice: Any) -> None:
        """Put hooks in force for the trace of a frame, as long as `notice` lives."""
        leave()
        tracing.hooked = token = object()
        patches.enter(token)
        # also where an interrupt keeps Dynamo from saying that it has ended
        with contextlib.suppress(TypeError):
            weakref.finalize(notice, patches.settle, token).atexit = False
        owner = frame.f_locals.get("self")
        several = getattr(type(owner), STEPS, False)
        for optimizer in owner.optimizers if several else [owner]:
            if isinstance(optimizer, torch.optim.Optimizer):
                self.check(optimizer)
        seen = optimizers_of(frame)
        for kept in seen:
            reason = self.keep(kept)
            if reason:
                is_step = is_step_of(frame.f_code, kept)
                leave_to_eager(reason, is_step and not holds_others(kept))
        within = stepping()
        if within and is_helper(frame):
            leave_to_eager("it is a part of a step that is not compiled")
        if seen or within:
            tracing.owners = [*seen, *within]
            tracing.own = any(map(is_own, tracing.owners))
            for context in (scalar_outputs(), collector_paused(), Apart(seen)):
                context.__enter__()
                tracing.patches.append(context)

    def _end(self, _: Any) -> None:
        """Dynamo has ended a trace."""
        leave()

    def resume(self) -> None:
        """Called with a graph. Where Dynamo has traced it without hooks, put them in
        force and begin the trace anew.
        """
        if tracing.hooked or not TRACE_CALLBACKS.available():
            return
        names = _trace()
        frame, reasons = names.get("frame"), names.get("restart_reasons")
        if frame is None or not leads_to(names.get("compiler_fn"), self.backend):
            return  # the backend was called by hand
        again = "fuseopt was not told of this trace"
        restart = find("torch._dynamo.exc:TensorifyScalarRestartAnalysis", None)
        log = _nearest("speculation_log")
        known = isinstance(reasons, set) and hasattr(log, "clear")
        if restart is None or not known or again in reasons:
            TRACE_CALLBACKS.lack("Dynamo does not say when it begins to trace")
            return
        self.ask()
        handler = find("torch._dynamo.callback:callback_handler")
        if getattr(handler, COUNT, None) is not None:
            setattr(handler, COUNT, _traces_under_way())
        log.clear()  # with hooks the trace takes another course
        with ends_pass():
            self._follow(frame, reasons)  # which live as long as the trace goes on
        raise restart(restart_reason=again)


def _is_of_a_frame(notice: Any) -> bool:
    """Is what Dynamo begins the trace of a function?"""
    trigger = getattr(notice, "callback_trigger", None)
    return getattr(trigger, "name", "DYNAMO") == "DYNAMO"


def _trace() -> Any:
    """The local variables of Dynamo's function that traces a frame, the nearest one."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_locals.keys() >= {"frame", "compiler_fn"}:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def frame_traced() -> Any:
    """The frame that Dynamo traces now, in this thread; None if there is none."""
    return _trace().get("frame")


def _nearest(name: str) -> Any:
    """The nearest local variable of this name among the callers, or None."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def _traces_under_way() -> int:
    """How many traces go on in this thread, one within the other."""
    trace = find("torch._dynamo.convert_frame:_compile", None)
    if trace is None:
        return 0
    code = inspect.unwrap(trace).__code__
    frame: types.FrameType | None = sys._getframe(1)
    n = 0
    while frame is not None:
        n += frame.f_code is code
        frame = frame.f_back
    return n


def leave() -> None:
    """Take back what was set for a trace of this thread, which has ended."""
    if tracing.hooked is not None:
        patches.settle(tracing.hooked)
        tracing.hooked = None  # an interrupt before this lets `__exit__` settle it
    tracing.leave()


def settle_interrupted() -> None:
    """Put right what an interrupt has left of a trace that nobody goes on with.

    Dynamo counts the traces that are under way, and calls whoever wants to know of the
    first alone: an interrupt while it counts back would end that for ever, and
    `torch._dynamo.reset()` would raise.
    """
    if _traces_under_way():
        return  # one is under way, and this is within it
    leave()
    handler = find("torch._dynamo.callback:callback_handler", None)
    if getattr(handler, COUNT, 0) and not _others_trace():
        setattr(handler, COUNT, 0)


def _others_trace() -> bool:
    """Does another thread hold the lock that Dynamo traces under?"""
    lock = find("torch._dynamo.convert_frame:compile_lock", None)
    if lock is None or not lock.acquire(blocking=False):
        return True
    lock.release()
    return False
