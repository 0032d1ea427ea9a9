"""Window in which fuseopt traces: hooks are in force from Dynamo's begin to its end.

Dynamo calls registered callbacks when it begins to trace and when it has ended, under
its compile lock. In between, if it traces for fuseopt, all hooks of patches.py are in
force; other threads that want to trace wait for the lock. At any other time torch is as
it was imported.

`torch._dynamo.reset()` drops the callbacks, and an interrupt may spoil Dynamo's count
of traces, so that no callback runs. Then the backend gets a graph that was traced
without hooks. It registers again, and makes Dynamo begin that trace anew.
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
from .gradients import SeparateGradients
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

#: The attribute of its handler in which Dynamo counts the running traces.
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
    reaches the caller of the step before anything ran. keep: returns the reason why
    code that holds an optimizer must run in eager, or "".
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
        # a callback may run while Dynamo is tracing, and must not be traced too
        disable: Any = torch.compiler.disable
        self._began, self._ended = disable(self._begin), disable(self._end)
        self._handler: Any = None

    def register(self) -> None:
        """Register for the begin and the end of traces, unless registered already."""
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
        """Register before a call of compiled code, which may trace."""
        self.register()

    def __exit__(self, *_: object) -> None:
        if tracing.hooked is not None:
            settle_interrupted()

    def _begin(self, notice: Any) -> None:
        """Put hooks in force if Dynamo begins a trace for this backend."""
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
        # also if an interrupt keeps Dynamo from reporting its end
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
            for context in (
                scalar_outputs(),
                collector_paused(),
                SeparateGradients(seen),
            ):
                context.__enter__()
                tracing.patches.append(context)

    def _end(self, _: Any) -> None:
        """Leave the trace that Dynamo has ended."""
        leave()

    def resume(self) -> None:
        """Check a graph: if it was traced without hooks, begin its trace anew with
        hooks.
        """
        if tracing.hooked or not TRACE_CALLBACKS.available():
            return
        names = _trace()
        frame, reasons = names.get("frame"), names.get("restart_reasons")
        if frame is None or not leads_to(names.get("compiler_fn"), self.backend):
            return  # user code called the backend
        again = "fuseopt was not notified of this trace"
        restart = find("torch._dynamo.exc:TensorifyScalarRestartAnalysis", None)
        log = _nearest("speculation_log")
        known = isinstance(reasons, set) and hasattr(log, "clear")
        if restart is None or not known or again in reasons:
            TRACE_CALLBACKS.lack("Dynamo does not say when it begins to trace")
            return
        self.register()
        handler = find("torch._dynamo.callback:callback_handler")
        if getattr(handler, COUNT, None) is not None:
            setattr(handler, COUNT, _traces_under_way())
        log.clear()  # with hooks the trace takes another course
        with ends_pass():
            self._follow(frame, reasons)  # these objects live as long as the trace
        raise restart(restart_reason=again)


def _is_of_a_frame(notice: Any) -> bool:
    """Does Dynamo begin the trace of a function?"""
    trigger = getattr(notice, "callback_trigger", None)
    return getattr(trigger, "name", "DYNAMO") == "DYNAMO"


def _trace() -> Any:
    """Return the local variables of Dynamo's nearest function that traces a frame."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals  # whose keys are a list from Python 3.13 on
        if "frame" in names and "compiler_fn" in names:
            return names
        frame = frame.f_back
    return {}


def frame_traced() -> Any:
    """Return the frame that Dynamo traces now in this thread, or None."""
    return _trace().get("frame")


def _nearest(name: str) -> Any:
    """Return the nearest local variable of this name among the callers, or None."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return None if frame is None else frame.f_locals[name]


def _traces_under_way() -> int:
    """Return the number of nested traces that run in this thread."""
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
    """Reset the state of this thread's trace, which has ended."""
    if tracing.hooked is not None:
        patches.settle(tracing.hooked)
        # after an interrupt before this line, `__exit__` settles it
        tracing.hooked = None
    tracing.leave()


def settle_interrupted() -> None:
    """Repair the state that an interrupted trace has left.

    Dynamo counts the running traces, and calls back only for the first. An interrupt
    while it counts down would end the callbacks for ever, and `torch._dynamo.reset()`
    would raise.
    """
    if _traces_under_way():
        return  # this runs within a trace
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
