"""Free the memory that Dynamo keeps for a compiled function after its last user."""

from __future__ import annotations

import contextlib
import functools
import linecache
import sys
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .capability import probed
from .names import Missing, find


@probed(
    "freed-compilations",
    "what Dynamo keeps of a compiled step is freed with its optimizer",
    "a process that makes many optimizers grows; torch swaps no parameter of a step",
)
def FREED() -> None:
    find("torch._C:_dynamo.eval_frame._debug_get_cache_entry_list")
    find("torch._C:_dynamo.eval_frame.reset_code")
    find("torch._dynamo.eval_frame:cached_backends")


class TraceFakes:
    """Fake tensors that Dynamo traced with, weakly referenced.

    A parameter's fake holds the fake of its gradient where Python's garbage collector
    cannot reach it. So all of a trace would stay for ever. Caches of size queries hold
    the last fakes. Relies on the context of a trace, and on the list of fakes in its
    shape environment. If these are elsewhere, the fakes stay.
    """

    def __init__(self) -> None:
        self._shapes: list[weakref.ref[Any]] = []
        self._contexts: list[weakref.ref[Any]] = []
        #: True if a trace may hold weak references to its tensor arguments
        self.hold = False
        #: the file names of graphs in linecache
        self.files: list[str] = []

    def note(self) -> None:
        """Record the fakes of this trace; called by a backend."""
        self.hold = True
        # the graph's file, which torch.fx has just made; its module does not name it
        last = next(reversed(linecache.cache), "")
        if last.startswith("<eval_with_key>"):
            self.files.append(last)
        tracing = find("torch._guards:TracingContext", None)
        context = None if tracing is None else tracing.try_get()
        shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
        if shapes is not None:
            self._shapes = [x for x in self._shapes if x() is not None]
            self._shapes.append(weakref.ref(shapes))
            self._contexts = [x for x in self._contexts if x() is not None]
            self._contexts.append(weakref.ref(context))

    def unhand(self) -> None:
        """Drop a trace's weak references to its tensor arguments, after the trace.

        torch cannot swap a tensor with weak references (`torch.utils.swap_tensors`).
        Relies on where a trace's fakes record their tensors; if elsewhere, the
        references stay.
        """
        self.hold = False
        for reference in self._shapes:
            for tracked in getattr(reference(), "tracked_fakes", None) or ():
                mode = getattr(getattr(tracked, "fake", None), "fake_mode", None)
                converter = getattr(mode, "fake_tensor_converter", None)
                describer = getattr(
                    getattr(converter, "meta_converter", None), "describer", None
                )
                known = getattr(describer, "lookup_tensor", None)
                if known is not None:
                    known.clear()

    def unhand_contexts(self) -> None:
        """Drop the weak references of traces whose code Dynamo has dropped."""
        self.unhand()
        for context in self._contexts:
            known = getattr(context(), "tensor_to_context", None)
            if known is not None:
                known.clear()

    def forget(self) -> None:
        """Release the fakes of finished traces."""
        while self._shapes:
            shapes = self._shapes.pop()()
            for tracked in getattr(shapes, "tracked_fakes", None) or ():
                fake = getattr(tracked, "fake", None)
                if isinstance(fake, torch.Tensor):
                    fake.grad = None
            # its methods cache the environment of their last call
            for method in vars(type(shapes)).values():
                clear = getattr(method, "cache_clear", None)
                if callable(clear):
                    clear()


class WeakMemory:
    """Tests whether a tensor's memory still exists, without a reference to the tensor.

    Relies on torch's weak reference to memory; without it, memory counts as existing.
    """

    def __init__(self, t: torch.Tensor) -> None:
        weakly: Any = find("torch.multiprocessing.reductions:StorageWeakRef", None)
        self._memory = None if weakly is None else weakly(t.untyped_storage())

    def lasts(self) -> bool:
        """Does the memory exist?"""
        return self._memory is None or not self._memory.expired()


def forget(codes: Iterable[types.CodeType], backend: Callable[..., Any]) -> None:
    """Drop Dynamo's compilations of some code for one backend, and the backend.

    The code must never run again. A code object takes its compilations with it, except
    two things. Each object that a guard compares by identity has a finalizer for the
    guard. Those of modules and of torch's functions stay for ever. And each backend
    passed to Dynamo stays in a table. Relies on the registry of Python's finalizers,
    and on the table of Dynamo's module. If these are elsewhere, both stay, which costs
    only memory.
    """
    if not FREED.available():
        return
    try:
        backends = find("torch._dynamo.eval_frame:cached_backends")
        eval_frame = find("torch._C:_dynamo.eval_frame")
        guards = {
            id(entry.guard_manager)
            for code in codes
            for entry in eval_frame._debug_get_cache_entry_list(code)
        }
        for code in codes:
            eval_frame.reset_code(code)
        for key, entry in [] if _resets() else [*backends.items()]:
            if entry is backend or getattr(entry, "compiler_fn", None) is backend:
                backends.pop(key, None)
        _drop_finalizers(guards)
    except (Missing, AttributeError) as error:
        FREED.broke(error)


def _resets() -> bool:
    """Does a thread reset Dynamo? It visits all backends, then clears their table."""
    loop = find("torch._dynamo.eval_frame:_reset_guarded_backend_cache", None)
    code = getattr(loop, "__code__", None)
    # a local variable with this function's frame would keep all frames below it alive
    return any(_runs(code, x) for x in sys._current_frames().values())


def _runs(code: types.CodeType | None, frame: types.FrameType | None) -> bool:
    """Is a frame, or one below it, of this code?"""
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def tidy(codes: Iterable[types.CodeType], graphs: Iterable[str]) -> None:
    """Shorten lists that Dynamo and torch.fx extend at each compilation and never read.

    These are weak references to deleted code, the places of reported metrics and of
    frames, and the source text of graphs. Relies on the lists themselves; a missing one
    is left out.
    """
    if not FREED.available():
        return
    with contextlib.suppress(Missing, AttributeError):
        converter = find("torch._dynamo.convert_frame")
        for tracker in (converter.input_codes, converter.output_codes):
            tracker.seen[:] = [ref for ref in tracker.seen if ref() is not None]
    with contextlib.suppress(Missing, AttributeError):
        context = find("torch._dynamo.utils:get_metrics_context")()
        if not context.in_progress():
            context._edits.clear()
    with contextlib.suppress(Missing, AttributeError):
        state = find("torch._dynamo.eval_frame:dynamo_tls")
        places = {f"{c.co_name} {c.co_filename}:{c.co_firstlineno}" for c in codes}
        infos = state.traced_frame_infos
        infos[:] = [info for info in infos if info not in places]
    for name in graphs:
        linecache.cache.pop(name, None)
        with contextlib.suppress(Missing, AttributeError):
            find("torch.fx.graph_module:_loader").eval_cache.pop(name, None)


def after_reset(every: Iterable[TraceFakes]) -> None:
    """Drop weak references to tensors after `torch._dynamo.reset()` dropped all code.

    torch cannot swap a tensor that has any. Relies on what `unhand` and `forget` rely
    on, and on the lock of compilations, which `reset` holds.
    """
    if not FREED.available():
        return
    try:
        for traces in every:
            traces.unhand_contexts()
        _drop_finalizers(set(), reset=True)
    except AttributeError as error:
        FREED.broke(error)


def _drop_finalizers(guards: set[int], reset: bool = False) -> None:
    """Detach finalizers whose guards are these, or no longer exist. `reset`: also those
    of guards without code, which no compilation is about to use.
    """
    # one call of C: making a list of items may trigger a collection, which removes
    # entries
    registry = weakref.finalize._registry.copy()  # type: ignore[attr-defined]
    for finalizer, info in registry.items():
        call = info.func
        if not isinstance(call, functools.partial):
            continue
        owner = getattr(call.func, "__self__", None)
        if type(owner).__name__ != "CheckFunctionManager":
            continue
        manager = getattr(owner, "guard_manager", None)
        is_deleted = type(manager).__name__ == "DeletedGuardManagerWrapper"
        is_deleted |= reset and getattr(manager, "cache_entry", 0) is None
        if is_deleted or id(manager) in guards:
            finalizer.detach()
