"""Call code that Dynamo has compiled without torch.compile's overhead at each call."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..handlers import passing
from .capability import cached, probed
from .contexts import setting
from .facts import Fact, attributes, entry, not_none, result
from .names import Missing, find
from .patch_state import patch_state
from .tracing import tracing
from .window import TRACE_CALLBACKS, settle_interrupted


@probed(
    "stance",
    "what torch.compiler.set_stance asks for is followed",
    "each call is Dynamo's own, which follows it: some 20 microseconds more",
)
def STANCE() -> None:
    stance = find("torch._dynamo.eval_frame:_stance")
    if not isinstance(stance.stance, str) or not hasattr(stance, "backend"):
        raise Missing("torch._dynamo.eval_frame._stance says something else")
    with torch.compiler.set_stance("eager_on_recompile"):
        if _eval_frame()._stance.stance != "eager_on_recompile":
            raise Missing("torch.compiler.set_stance is kept elsewhere")


#: What `stance` returns within a dispatch mode.
IN_MODE = "in a dispatch mode"


def stance() -> str:
    """Return the stance last set with `torch.compiler.set_stance`.

    "other" for a stance with a backend, or if torch does not report it; IN_MODE within
    a dispatch mode of the user's.
    """
    if not (STANCE.there or STANCE.available()):
        return "other"
    if torch._C._len_torch_dispatch_stack() and _in_dispatch_mode():
        return IN_MODE
    stance = _eval_frame()._stance
    return str(stance.stance) if stance.backend is None else "other"


def stance_facts() -> list[Fact]:
    """Return facts of which the present result of `stance` follows, outside of modes.

    Raises AttributeError or TypeError where torch holds the stance in another way.
    """
    home = _eval_frame()
    return [
        entry(vars(home), "_stance"),
        *attributes(home._stance, "stance", "backend"),
    ]


def _in_dispatch_mode() -> bool:
    """Does a dispatch mode of the user's get each ATen call?

    A kernel makes none. Dynamo traces no function within such a mode, and never tries
    that function again. Modes for compilers do not count (`ignore_compile_internals`).
    False if torch does not report them.
    """
    is_on = _dispatch_mode_is_on()
    return is_on is not None and is_on()


@functools.cache
def _dispatch_mode_is_on() -> Callable[[], bool] | None:
    name = "torch.utils._python_dispatch:any_torch_dispatch_mode_on_stack"
    return find(name, None)  # type: ignore[no-any-return]


@functools.cache
def _eval_frame() -> Any:
    return find("torch._dynamo.eval_frame")


def must_fail() -> bool:
    """Must Dynamo fail rather than trace anew, at all or beyond its limit?"""
    config = find("torch._dynamo:config", None)
    flag = getattr(config, "fail_on_recompile_limit_hit", False)
    return bool(flag) or stance() == "fail_on_recompile"


#: Dynamo's error at its recompile limit, and the base class.
_LIMIT, _ANY = "FailOnRecompileLimitHit", "TorchDynamoException"


@functools.cache
def dynamo_errors() -> tuple[type[Exception], ...]:
    """Return the errors that Dynamo raises if it cannot trace a function whole.

    Relies on the class of its errors, and on another class outside of it; missing
    classes are left out.
    """
    names = (f"torch._dynamo.exc:{name}" for name in (_ANY, _LIMIT))
    return tuple(x for name in names if (x := find(name, None)))


def is_limit(error: BaseException) -> bool:
    """Did Dynamo hit its recompile limit?"""
    return type(error).__name__ == _LIMIT


def reason_of(error: BaseException) -> str:
    """Return an error's first line, or its type if it has no text."""
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


#: Instructions that write global variables.
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})


class DirectDynamoCall:
    """A function of `self` alone, with Dynamo's compilations of it.

    `compiled`: the result of torch.compile. A call has the effect of `compiled(x)`. If
    a graph's guards hold, its code runs at once: the same guards, the same code. This
    omits what torch.compile sets and resets around each call in case it traces. Relies
    on how Dynamo keeps compilations with a code object; otherwise `compiled` is called.
    """

    def __init__(
        self, compiled: Callable[..., Any], function: Any, times: int = 1
    ) -> None:
        self.compiled = compiled
        #: the factor by which this function may exceed Dynamo's recompile limit
        self.times = times
        self.function = function
        #: the arguments of guards besides `self`
        self.closed = {
            name: cell.cell_contents
            for name, cell in zip(
                function.__code__.co_freevars, function.__closure__ or (), strict=True
            )
        }
        #: for each graph: the owner of its guards, their check, its code as a function
        self.known: list[tuple[Any, Callable[[Any], bool], Callable[[Any], Any]]] = []

    def __call__(self, x: Any) -> Any:
        if self.known and not any_tracer()():
            arguments = {"self": x, **self.closed}
            for guards, fit, run in self.known:
                # Dynamo takes the entry away when it drops the graph
                if guards.cache_entry is not None and fit(arguments):
                    return run(x)
        patch_state.register()
        before = tracing.given
        tracing.given = [*getattr(x, "optimizers", (x,))]
        try:
            with passing(), _no_records(), _more_traces(self.times):
                if DIRECT_CALLS.available() or not TRACE_CALLBACKS.there:
                    # a trace is likely, and its begin may not be reported
                    for optimizer in tracing.given:
                        patch_state.allocate(optimizer)
                result = self.compiled(x)
        except BaseException:
            settle_interrupted()
            raise
        finally:
            tracing.given = before
        self._note()
        return result

    def fitting(self, x: Any) -> list[int]:
        """Return the indices of the graphs whose guards hold for `x`, as far as
        possible.
        """
        arguments = {"self": x, **self.closed}
        return [
            i
            for i, (guards, fit, _) in enumerate(self.known)
            if guards.cache_entry is not None and fit(arguments)
        ]

    def direct(
        self, x: Any, graph: Callable[..., Any]
    ) -> tuple[Callable[[], bool], Callable[[Any], Any]] | None:
        """Return a function that checks the guards for `x`, and the compiled code as a
        function that calls `graph` in place of Dynamo's graph.

        Returns None if there are several compilations, or if the code calls more than
        one graph or writes global variables.
        """
        if len(self.known) != 1:
            return None
        ((guards, fit, run),) = self.known
        arguments = {"self": x, **self.closed}
        code = run.__code__
        calls = [n for n in code.co_names if n.startswith(("__compiled", "__resume"))]
        if len(calls) != 1 or calls[0].startswith("__resume") or _writes_globals(code):
            return None

        def fits() -> bool:
            if guards.cache_entry is None or any_tracer()():
                return False
            return fit(arguments)

        names = {**run.__globals__, calls[0]: graph}
        return fits, types.FunctionType(
            code, names, run.__name__, None, run.__closure__
        )

    def facts(self, x: Any) -> list[Fact] | None:
        """Return the facts that the guards of `direct` hold for `x`, and no tracer is
        active. None if the compiled code reads or writes more than `x` holds.

        Then it calls its graph with the same objects as long as `x` has the same ones.
        """
        ((guards, fit, run),) = self.known
        held, traces = vars(guards), tracers()
        if traces is None or "cache_entry" not in held or not _repeatable(run.__code__):
            return None
        quiet = [result(value, function) for function, value in traces]
        arguments = {"self": x, **self.closed}
        return [*quiet, not_none(held, "cache_entry"), result(True, fit, arguments)]

    def _note(self) -> None:
        """Collect the graphs that Dynamo now has for the function."""
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
        """Return the compiled code as a function that calls its graph directly.

        Dynamo wraps the graph in a function that keeps Dynamo away; that is omitted
        here.
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


#: Instructions of compiled code that read and write nothing but what it can reach.
_LOCAL = frozenset(
    "BINARY_SUBSCR BUILD_LIST BUILD_MAP BUILD_TUPLE CACHE CALL CALL_FUNCTION "
    "CALL_METHOD COPY COPY_FREE_VARS DELETE_FAST DUP_TOP EXTENDED_ARG LIST_EXTEND "
    "LOAD_ATTR LOAD_CONST LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST LOAD_GLOBAL "
    "LOAD_METHOD NOP POP_TOP PRECALL PUSH_NULL RESUME RETURN_CONST RETURN_VALUE "
    "ROT_THREE ROT_TWO STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST SWAP "
    "UNPACK_SEQUENCE".split()
)
#: What compiled code may read besides its argument: functions of modules, by the names
#: that Dynamo gives the modules. One stores the current streams for a graph that uses
#: these, before each of its runs.
_READERS = {
    "__import_torch": {"device"},
    "__import_torch_dot__dynamo_dot_graph_bytecode_inputs": {
        "store_user_object_weakrefs"
    },
    "__import_torch_dot__dynamo_dot_utils": {"dict_keys_getitem", "get_current_stream"},
}


@functools.lru_cache(256)
def _writes_globals(code: types.CodeType) -> bool:
    return any(x.opname in _WRITES for x in dis.get_instructions(code))


@functools.lru_cache(256)
def _repeatable(code: types.CodeType) -> bool:
    """Does compiled code follow from what its argument holds alone?

    It calls one graph, once, and has no other effect but to update dicts of its
    argument. If such a run left these dicts as they were, so does the next one.
    """
    every = list(dis.get_instructions(code))
    names = [str(x.argval) for x in every if x.opname == "LOAD_GLOBAL"]
    graphs = [name for name in names if name not in _READERS]
    read = [
        x.argval in _READERS[before.argval]
        for before, x in itertools.pairwise(every)
        if before.opname == "LOAD_GLOBAL" and before.argval in _READERS
    ]
    allowed = {"update"}.union(*_READERS.values())
    methods = {x.argval for x in every if _loads_method(x)}
    local = _LOCAL.issuperset(x.opname for x in every)
    return local and len(graphs) == 1 and all(read) and methods <= allowed


def _loads_method(x: dis.Instruction) -> bool:
    if x.opname == "LOAD_ATTR" and sys.version_info >= (3, 12):
        return bool((x.arg or 0) & 1)
    return x.opname == "LOAD_METHOD"


@cached
def any_tracer() -> Callable[[], Any]:
    """Return a function that is true while Dynamo or another tracer is active.

    It is always true if torch lacks one of the functions that report it.
    """
    functions = tracers()
    if functions is None:
        return lambda: True
    callback, is_tracing, fx_traces = (function for function, _ in functions)
    return lambda: callback() is not None or is_tracing() or fx_traces()


def tracers() -> list[tuple[Callable[[], Any], Any]] | None:
    """Return functions that report tracers, with their results while none is active.

    None if torch lacks one of them.
    """
    callback = find("torch._C:_dynamo.eval_frame.get_eval_frame_callback", None)
    fx_traces, is_tracing = _fx_traces(), find("torch._C:_is_tracing", None)
    if callback is None or fx_traces is None or is_tracing is None:
        return None
    return [(callback, None), (is_tracing, False), (fx_traces, False)]


@functools.cache
def _fx_traces() -> Callable[[], bool] | None:
    """Return a function: does torch.fx trace in this thread? None if torch has none."""
    flag = find("torch.fx._symbolic_trace:_get_is_fx_tracing", None)
    if flag is not None:
        return flag  # type: ignore[no-any-return]
    home = find("torch.fx._symbolic_trace", None)
    flag = find("torch.fx._symbolic_trace:_is_fx_tracing_flag", None)
    if home is None or flag is None:
        return None
    # before torch 2.14, a flag of the process
    return functools.partial(getattr, home, "_is_fx_tracing_flag")


def _more_traces(times: int) -> contextlib.AbstractContextManager[Any]:
    """Raise Dynamo's recompile limit by a factor."""
    config = find("torch._dynamo:config", None)
    if times == 1 or not hasattr(config, "recompile_limit"):
        return contextlib.nullcontext()
    return setting(config, recompile_limit=times * config.recompile_limit)


def _no_records() -> contextlib.AbstractContextManager[Any]:
    """Omit profiler marks from compiled code: a tenth of the time of a small step.

    Without such a setting, Dynamo writes its marks.
    """
    config = find("torch._dynamo:config", None)
    if not hasattr(config, "record_runtime_overhead"):
        return contextlib.nullcontext()
    return setting(config, record_runtime_overhead=False)
