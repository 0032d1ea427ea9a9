"""Call the code that Dynamo has compiled without torch.compile's work at each call."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from ..handlers import passing
from .capability import probed
from .contexts import setting
from .names import Missing, find
from .tracing import tracing
from .watched import watched
from .window import settle_interrupted


@probed(
    "stance",
    "what torch.compiler.set_stance asks for is followed",
    "each call is Dynamo's own, which follows it: some 20 microseconds more",
)
def STANCE() -> None:
    told = find("torch._dynamo.eval_frame:_stance")
    if not isinstance(told.stance, str) or not hasattr(told, "backend"):
        raise Missing("torch._dynamo.eval_frame._stance says something else")
    with torch.compiler.set_stance("eager_on_recompile"):
        if _eval_frame()._stance.stance != "eager_on_recompile":
            raise Missing("torch.compiler.set_stance is kept elsewhere")


def stance() -> str:
    """What `torch.compiler.set_stance` told Dynamo last; "other": another backend, or
    torch does not say.
    """
    if not (STANCE.there or STANCE.available()):
        return "other"
    told = _eval_frame()._stance
    return str(told.stance) if told.backend is None else "other"


@functools.cache
def _eval_frame() -> Any:
    return find("torch._dynamo.eval_frame")


def must_fail() -> bool:
    """Was Dynamo told to fail rather than to trace anew, at all or beyond its limit?"""
    config = find("torch._dynamo:config", None)
    asked = getattr(config, "fail_on_recompile_limit_hit", False)
    return bool(asked) or stance() == "fail_on_recompile"


#: Dynamo's error where it has traced a function as often as it does, and its base.
_LIMIT, _ANY = "FailOnRecompileLimitHit", "TorchDynamoException"


@functools.cache
def dynamo_errors() -> tuple[type[Exception], ...]:
    """What Dynamo raises where it does not trace what it was told to trace whole.

    Relies on the class of its errors, and on that of another which is none of them;
    classes that there are not are left out.
    """
    names = (f"torch._dynamo.exc:{name}" for name in (_ANY, _LIMIT))
    return tuple(x for name in names if (x := find(name, None)))


def is_limit(error: BaseException) -> bool:
    """Has Dynamo traced a function as often as it does?"""
    return type(error).__name__ == _LIMIT


def reason_of(error: BaseException) -> str:
    """An error's first line, or its type where it says nothing."""
    if is_limit(error):
        return "it reached Dynamo's recompile limit"
    return str(error).strip().partition("\n")[0] or type(error).__name__


@probed(
    "direct-calls",
    "what Dynamo has compiled is called without torch.compile's work at each call",
    "a call takes some 30 microseconds longer",
)
def DIRECT_CALLS() -> None:
    find("torch._C:_dynamo.eval_frame._debug_get_cache_entry_list")
    find("torch._C:_dynamo.eval_frame.get_eval_frame_callback")
    if _fx_traces() is None:
        raise Missing("torch.fx does not say whether it traces")
    find("torch._C:_is_tracing")


class Traced:
    """A function of `self` alone, with what Dynamo has compiled for it.

    `compiled`: what torch.compile made of it. A call does what `compiled(x)` does, but
    where one of the graphs fits, its code runs at once: the same guards are asked, the
    same code is run, and what torch.compile sets and sets back around each call, for
    the case that it traces, is left out. Relies on how Dynamo keeps what it compiled
    with a code object; where it does not so, `compiled` is called.
    """

    def __init__(
        self, compiled: Callable[..., Any], function: Any, times: int = 1
    ) -> None:
        self.compiled = compiled
        #: how many times as often as any function Dynamo may trace this one
        self.times = times
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
        if self.known and traced_by_nobody():
            arguments = {"self": x, **self.closed}
            for guards, fit, run in self.known:
                # Dynamo takes the entry away when it drops the graph
                if guards.cache_entry is not None and fit(arguments):
                    return run(x)
        watched.ask()
        before = tracing.given
        tracing.given = [*getattr(x, "optimizers", (x,))]
        try:
            with passing(), _no_records(), _more_traces(self.times):
                result = self.compiled(x)
        except BaseException:
            settle_interrupted()
            raise
        finally:
            tracing.given = before
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
        self.known = graphs
        if not DIRECT_CALLS.available():
            return
        entries = find("torch._C:_dynamo.eval_frame._debug_get_cache_entry_list")
        try:
            for entry in entries(self.function.__code__):
                guards = entry.guard_manager
                if guards.cache_entry is not None:
                    run = self._called(entry.code)
                    graphs.append((guards, guards.root.check, run))
        except AttributeError as error:
            graphs.clear()
            DIRECT_CALLS.broke(error)

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
        fx_traces = _fx_traces()
        return callback is None and not (
            fx_traces is None or torch._C._is_tracing() or fx_traces()
        )
    except AttributeError:
        return False


@functools.cache
def _fx_traces() -> Callable[[], bool] | None:
    """Does torch.fx trace in this thread? None where torch does not say."""
    asked = find("torch.fx._symbolic_trace:_get_is_fx_tracing", None)
    if asked is not None:
        return asked  # type: ignore[no-any-return]
    home = find("torch.fx._symbolic_trace", None)
    flag = find("torch.fx._symbolic_trace:_is_fx_tracing_flag", None)
    if home is None or flag is None:
        return None
    # before torch 2.14, a flag of the process
    return functools.partial(getattr, home, "_is_fx_tracing_flag")


def _more_traces(times: int) -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo trace a function some times as often as it does any."""
    config = find("torch._dynamo:config", None)
    if times == 1 or not hasattr(config, "recompile_limit"):
        return contextlib.nullcontext()
    return setting(config, recompile_limit=times * config.recompile_limit)


def _no_records() -> contextlib.AbstractContextManager[Any]:
    """Let Dynamo write no marks for profilers into what it compiles: of a small step
    they are a tenth. Where it has no such setting, it writes what it will.
    """
    config = find("torch._dynamo:config", None)
    if not hasattr(config, "record_runtime_overhead"):
        return contextlib.nullcontext()
    return setting(config, record_runtime_overhead=False)
