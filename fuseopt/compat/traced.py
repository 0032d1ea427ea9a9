"""Call the code that Dynamo has compiled without torch.compile's work at each call."""

from __future__ import annotations

import contextlib
import functools
import importlib
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import _symbolic_trace as _fx

from .contexts import setting


def stance() -> str:
    """What `torch.compiler.set_stance` told Dynamo last; "other": another backend.

    Relies on where Dynamo keeps that; an AttributeError tells of another place.
    """
    told = _eval_frame()._stance
    return str(told.stance) if told.backend is None else "other"


def must_fail() -> bool:
    """Was Dynamo told to fail rather than to trace anew, at all or beyond its limit?"""
    asked = getattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)
    return bool(asked) or stance() == "fail_on_recompile"


#: Dynamo's error where it has traced a function as often as it does, and its base.
_LIMIT, _ANY = "FailOnRecompileLimitHit", "TorchDynamoException"


@functools.cache
def dynamo_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises where it does not trace what it was told to trace whole.

    Relies on the class of its errors, and on that of another which is none of them;
    classes that there are not are left out.
    """
    module = importlib.import_module("torch._dynamo.exc")
    return tuple(x for n in (_ANY, _LIMIT) if (x := getattr(module, n, None)))


def reason_of(error: BaseException) -> str:
    """An error's first line, or its type where it says nothing."""
    if type(error).__name__ == _LIMIT:
        return "torch has traced it as often as it does (recompile_limit)"
    return str(error).strip().partition("\n")[0] or type(error).__name__


@functools.cache
def _eval_frame() -> Any:
    return importlib.import_module("torch._dynamo.eval_frame")


class Traced:
    """A function of `self` alone, with what Dynamo has compiled for it.

    `compiled`: what torch.compile made of it. A call does what `compiled(x)` does, but
    where one of the graphs fits, its code runs at once: the same guards are asked, the
    same code is run, and what torch.compile sets and sets back around each call, for
    the case that it traces, is left out. Relies on how Dynamo keeps what it compiled
    with a code object; where it does not so, `compiled` is called.
    """

    def __init__(self, compiled: Callable[..., Any], function: Any) -> None:
        self.compiled = compiled
        self.function = function
        #: what guards are asked of besides `self`
        self.closed = {
            name: cell.cell_contents
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            )
        }
        #: of each graph: who has its guards, what asks them, its code as a function
        self.known: list[tuple[Any, Callable[[Any], bool], Callable[[Any], Any]]] = []

    def __call__(self, x: Any) -> Any:
        if traced_by_nobody():
            arguments = {"self": x, **self.closed}
            for guards, fit, run in self.known:
                # Dynamo takes the entry away when it drops the graph
                if guards.cache_entry is not None and fit(arguments):
                    return run(x)
        with _no_records():
            result = self.compiled(x)
        self._note()
        return result

    def fitting(self, x: Any) -> list[int]:
        """Which of the graphs have guards that hold for `x`, as far as can be known."""
        arguments = {"self": x, **self.closed}
        return [
            i
            for i, (guards, fit, _) in enumerate(self.known)
            if guards.cache_entry is not None and fit(arguments)
        ]

    def _note(self) -> None:
        """Take over the graphs that Dynamo now has for the function."""
        graphs: list[Any] = []
        try:
            eval_frame = torch._C._dynamo.eval_frame
            for entry in eval_frame._debug_get_cache_entry_list(self.function.__code__):
                guards = entry.guard_manager
                if guards.cache_entry is not None:
                    run = self._called(entry.code)
                    graphs.append((guards, guards.root.check, run))
        except AttributeError:
            graphs.clear()
        self.known = graphs

    def _called(self, code: types.CodeType) -> Callable[[Any], Any]:
        """What was compiled, as a function that calls its graph itself.

        For Dynamo the graph is within what keeps Dynamo away, which is away here.
        """
        function = self.function
        names = dict(function.__globals__)
        for name in code.co_names:
            graph = getattr(names.get(name), "_torchdynamo_orig_callable", None)
            if graph is not None and name.startswith("__compiled_fn"):
                names[name] = graph
        return types.FunctionType(
            code, names, function.__name__, None, function.__closure__
        )


def traced_by_nobody() -> bool:
    """Does neither Dynamo nor another tracer follow what is called now?"""
    try:
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback()
        return callback is None and not (
            torch._C._is_tracing() or _fx._is_fx_tracing_flag
        )
    except AttributeError:
        return False


def _no_records() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo write no marks for profilers into what it compiles: of a small step
    they are a tenth. Where it has no such setting, it writes what it will.
    """
    config = importlib.import_module("torch._dynamo.config")
    if not hasattr(config, "record_runtime_overhead"):
        return contextlib.nullcontext()
    return setting(config, record_runtime_overhead=False)
