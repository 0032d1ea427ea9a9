"""Detect graph breaks, the recompile limit and failures of Dynamo."""

from __future__ import annotations

import contextlib
import inspect
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .capability import probed
from .contexts import within_copy
from .layers import leads_to, traces_for
from .leaving import leave_to_eager, refusal_of
from .names import find
from .owners import holds_others, is_step_of, optimizers_of
from .patch_state import patch_state
from .patches import Hook, Patcher, goes_on, patch, patches
from .tracing import tracing

#: Intended graph breaks: by torch.optim's own decorator, and by closures.
MEANT = ("Call to `torch._dynamo.graph_break()`", "`torch.compiler.disable()`d")


@patch(
    "graph-break-notices",
    "a warning names the line at which Dynamo breaks a graph",
    "a step that is compiled in pieces is not reported",
)
def GRAPH_BREAKS(patcher: Patcher) -> None:
    kind = find("torch._dynamo.symbolic_convert:InstructionTranslatorBase")
    backend = patcher.backend

    def log_graph_break(original: Hook, self: Any, *args: Any, **kwargs: Any) -> Any:
        errors = [x for x in (*args, *kwargs.values()) if isinstance(x, Exception)]
        if errors:
            if tracing.refusal in str(errors[0]):
                tracing.refusal = ""
            _note(self, errors[0], backend)
        return original(self, *args, **kwargs)

    patcher.around(kind, "log_graph_break", log_graph_break, "self")


def _note(tx: Any, error: Any, backend: Callable[..., Any]) -> None:
    """Report a graph break within code that holds an optimizer.

    Code that the step calls while gradients are recorded does not count: it is a
    closure, not the update.
    """
    stack = getattr(error, "real_stack", None)
    if tracing.cuts is not None:
        tracing.cuts += [*(stack or ())]
    kind = str(getattr(error, "gb_type", ""))
    if (
        getattr(error, "logged", False)
        or any(meant in kind for meant in MEANT)
        or not traces_for(tx, backend)
    ):
        return
    owners = optimizers_of(tx.output.root_tx)
    line = stack[-1] if stack else None
    if owners and line and torch.is_grad_enabled():
        # in the closure of a step, if not in a step that records gradients
        code = inspect.unwrap(type(owners[0]).step).__code__
        in_step = (code.co_filename, code.co_name) == (line.filename, line.name)
        line = line if in_step else None
    if owners and line and not refusal_of(owners[0]):
        place = f"{line.filename}:{line.lineno}: {line.line}"
        patch_state.report_break(place, kind or type(error).__name__, owners[0])


@contextlib.contextmanager
def cuts_noted() -> Iterator[list[Any]]:
    """Collect the source lines at which Dynamo breaks a graph in this thread.

    The list also has the lines that led there: objects with `filename`, `lineno`,
    `name` and `line`.
    """
    before, tracing.cuts = tracing.cuts, []
    try:
        yield tracing.cuts
    finally:
        tracing.cuts = before


# ---------------------------------------------------------------- limits


@probed(
    "limit-notices",
    "a warning reports that Dynamo reached its recompile limit",
    "a step that runs in eager beyond Dynamo's limit is reported by Dynamo's log alone",
)
def LIMITS() -> None:
    find("torch._dynamo.convert_frame:_compile")


class Limits(logging.Filter):
    """Detects in Dynamo's log that it hit the recompile limit of a function.

    Dynamo logs a warning. The function that hit the limit is in local variables of the
    function that warns; if these have other names, fuseopt reports nothing.
    """

    WORDS = "torch._dynamo hit config."

    def __init__(self, backend: Callable[..., Any]) -> None:
        super().__init__()
        self.backend = backend

    def filter(self, record: logging.LogRecord) -> bool:
        if str(record.msg).startswith(self.WORDS) and LIMITS.available():
            with contextlib.suppress(Exception):
                self._report(_last_guard(record.getMessage()))
        return True

    def _report(self, guard: str) -> None:
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and "compiler_fn" not in frame.f_locals:
            frame = frame.f_back
        names = {} if frame is None else frame.f_locals
        code = names.get("code")
        if code is None or not leads_to(names["compiler_fn"], self.backend):
            return
        owners = optimizers_of(names["frame"]) if names.get("frame") else []
        place = f"{code.co_filename}:{code.co_firstlineno}"
        first = owners[0] if owners else None
        patch_state.report_limit(f"{code.co_name} ({place})", first, guard)

    def listen(self) -> None:
        """Listen to Dynamo's log."""
        logger = logging.getLogger("torch._dynamo.convert_frame")
        if not any(isinstance(x, Limits) for x in logger.filters):
            logger.addFilter(self)


def _last_guard(text: str) -> str:
    """Return the guard that failed last, from Dynamo's log: "self.n == 3"; or ""."""
    _, _, rest = text.partition("last reason: ")
    guard = re.sub(r"^\d+/\d+: ", "", rest.partition("\n")[0]).partition("  #")[0]
    return guard.strip()


# ---------------------------------------------------------------- failures


@patch(
    "failures",
    "code on which Dynamo itself fails runs in eager, with a warning",
    "such an error reaches the caller of a step",
)
def FAILURES(patcher: Patcher) -> None:
    """Report failures of Dynamo, after which it breaks the graph.

    Errors of backends do not count. A call that raises in the trace does: eager may
    raise too, or not. Context variables of `config.patch` are removed here too: Dynamo
    does nearly all of a trace in these two functions.
    """
    home = find("torch._dynamo.convert_frame")
    known = find("torch._dynamo.exc:TorchDynamoException")
    raised: Any = find("torch._dynamo.exc:TorchRuntimeError", ())
    internal: Any = find("torch._dynamo.exc:InternalTorchDynamoError", ())
    prologue: Any = find("torch._dynamo.exc:ResumePrologueTracingError", ())
    backend = patcher.backend

    def traced(original: Hook, *args: Any, **kwargs: Any) -> Any:
        if not tracing.hooked:
            return original(*args, **kwargs)
        try:
            return within_copy(original, *args, **kwargs)
        except Exception as error:
            if isinstance(error, prologue) and goes_on(error.__context__):
                # Dynamo begins no trace anew within the first lines after a graph break
                patches.enter(patches.token)
                return traced(original, *args, **kwargs)
            own = isinstance(error, internal) or _is_dynamos_own(error, known)
            if not (own or isinstance(error, raised)):
                raise
            _report_failure(error, backend)
            raise AssertionError("Dynamo continued a graph after its end") from error

    patcher.outside(home, "compile_frame", traced, "code", "globals")
    patcher.outside(home, "CheckFunctionManager", traced)


def _is_dynamos_own(error: Exception, known: Any) -> bool:
    """Is an error a failure of Dynamo itself, and not an error about the step?

    Of the errors that torch defines, these are what Dynamo has not implemented.
    """
    home = type(error).__module__.partition(".")[0]
    if home == "torch" and isinstance(error, NotImplementedError):
        return not isinstance(error, known)
    foreign = home in ("torch", "fuseopt") or isinstance(error, (Warning, MemoryError))
    return not foreign and not isinstance(error, known)


def _report_failure(error: Exception, backend: Callable[..., Any]) -> None:
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and "frame" not in frame.f_locals:
        frame = frame.f_back
    traced = None if frame is None else frame.f_locals["frame"]
    code = getattr(traced, "f_code", None)
    place = "code"
    if code is not None:
        place = f"{code.co_name} ({code.co_filename}:{code.co_firstlineno})"
    reason = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    owners = optimizers_of(traced) if code is not None else []
    patch_state.report_failure(place, reason, owners[0] if owners else None)
    # of a step that runs in eager, no part is compiled alone
    step = code is not None and any(is_step_of(code, owner) for owner in owners)
    leave_to_eager(reason, step and not any(map(holds_others, owners)))
