"""Free what Dynamo keeps of a compiled function after its last user is gone."""

from __future__ import annotations

import contextlib
import functools
import importlib
import linecache
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Fakes:
    """The twins without memory that Dynamo traced with, known weakly.

    A parameter's twin holds that of its gradient where Python's garbage collector does
    not see it, and so all of a trace would stay for ever; caches of what was asked of
    sizes hold the last ones. Relies on the context of a
    trace and on the list of twins that the environment of its shapes has; where they
    are elsewhere, they stay.
    """

    def __init__(self) -> None:
        self._shapes: list[weakref.ref[Any]] = []
        #: the files that the graphs are said to be in
        self.files: list[str] = []

    def note(self) -> None:
        """Called by a backend: remember what this trace has."""
        # the graph's, which torch.fx has just made; a module of its does not say which
        last = next(reversed(linecache.cache), "")
        if last.startswith("<eval_with_key>"):
            self.files.append(last)
        context = torch._guards.TracingContext.try_get()
        shapes = getattr(getattr(context, "fake_mode", None), "shape_env", None)
        if shapes is not None:
            self._shapes = [x for x in self._shapes if x() is not None]
            self._shapes.append(weakref.ref(shapes))

    def forget(self) -> None:
        """Let go what nobody traces with any more."""
        while self._shapes:
            shapes = self._shapes.pop()()
            for tracked in getattr(shapes, "tracked_fakes", None) or ():
                fake = getattr(tracked, "fake", None)
                if isinstance(fake, torch.Tensor):
                    fake.grad = None
            # its methods remember for which environment they were called last
            for method in vars(type(shapes)).values():
                clear = getattr(method, "cache_clear", None)
                if callable(clear):
                    clear()


def forget(codes: Iterable[types.CodeType], backend: Callable[..., Any]) -> None:
    """Drop what Dynamo has compiled of some code for one backend, and the backend.

    Nobody may run it any more. With a code object goes what was compiled of it, but for
    two things. Each object that a guard knows by identity has a finalizer that would
    drop what the guard guards: those of modules and of torch's functions stay for ever.
    And each backend that Dynamo was given stays in a table. Relies on where both are:
    the registry of Python's finalizers, and the table of Dynamo's module; where they
    are elsewhere, both stay, which costs memory and nothing else.
    """
    try:
        evaluated: Any = importlib.import_module("torch._dynamo.eval_frame")
        eval_frame = torch._C._dynamo.eval_frame
        guards = {
            id(entry.guard_manager)
            for code in codes
            for entry in eval_frame._debug_get_cache_entry_list(code)
        }
        for code in codes:
            eval_frame.reset_code(code)
        backends = evaluated.cached_backends
        for key, entry in [*backends.items()]:
            if entry is backend or getattr(entry, "compiler_fn", None) is backend:
                backends.pop(key, None)
        _drop_finalizers(guards)
    except (ImportError, AttributeError):
        return


def tidy(codes: Iterable[types.CodeType], graphs: Iterable[str]) -> None:
    """Shorten what Dynamo and torch.fx note of each compilation and never look at.

    Weak references to code that is no more; where metrics were set, once they are told;
    the places of frames; the source text of graphs. Relies on the lists that these are
    in; one that is missing is left out.
    """
    with contextlib.suppress(ImportError, AttributeError):
        converter: Any = importlib.import_module("torch._dynamo.convert_frame")
        for tracker in (converter.input_codes, converter.output_codes):
            tracker.seen[:] = [ref for ref in tracker.seen if ref() is not None]
    with contextlib.suppress(ImportError, AttributeError):
        utils: Any = importlib.import_module("torch._dynamo.utils")
        context = utils.get_metrics_context()
        if not context.in_progress():
            context._edits.clear()
    with contextlib.suppress(ImportError, AttributeError):
        state: Any = importlib.import_module("torch._dynamo.eval_frame").dynamo_tls
        places = {f"{c.co_name} {c.co_filename}:{c.co_firstlineno}" for c in codes}
        infos = state.traced_frame_infos
        infos[:] = [info for info in infos if info not in places]
    for name in graphs:
        linecache.cache.pop(name, None)
        with contextlib.suppress(AttributeError):
            torch.fx.graph_module._loader.eval_cache.pop(name, None)


def _drop_finalizers(guards: set[int]) -> None:
    """Detach finalizers whose guards are these, or are no more."""
    # one call of C: to make a list of items may collect garbage, and with it entries
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
        if is_deleted or id(manager) in guards:
            finalizer.detach()
