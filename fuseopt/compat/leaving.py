"""Have Dynamo run in eager what it begins to trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ..errors import CaptureError
from .names import find
from .owners import holds_others, is_step_of
from .tracing import tracing
from .watched import watched


def leave_to_eager(reason: str, whole: bool = False) -> None:
    """Have Dynamo run the code that it begins to trace in eager, from now on; `whole`:
    and all that it calls.

    Raises what ends a graph of Dynamo's. Where torch has no such function, raises the
    exception with which a backend skips a frame.
    """
    end = find("torch._dynamo.exc:unimplemented", None)
    if end is not None:
        try:
            end(
                gb_type="a step that runs in eager",
                context="",
                explanation=reason,
                hints=[],
            )
        except TypeError:
            pass  # its signature is another
        except Exception as error:
            if whole:
                _skip_what_is_called(error)
            raise
    skip_frame(reason)


def _skip_what_is_called(error: Any) -> None:
    """Have Dynamo leave all that a frame calls, too; it reads this off an exception."""
    strategy = find("torch._dynamo.types:FrameExecStrategy", None)
    skip = find("torch._dynamo.types:FrameAction.SKIP", None)
    if strategy is not None and skip is not None:
        error.frame_exec_strategy = strategy(skip, skip)


def skip_frame(reason: str, whole: bool = False) -> NoReturn:
    """Called with a graph: have Dynamo run its frame in eager, from now on; `whole`:
    and all that it calls.

    Raises UnsupportedTorch where torch has no exception for that: nothing ran yet.
    """
    if whole and _passing() is not None:
        with ends_pass():
            leave_to_eager(reason, whole)
    skip = find("torch._dynamo.exc:SkipFrame", None)
    if skip is None:
        from ..errors import UnsupportedTorch

        raise UnsupportedTorch(
            f"this step must run in eager ({reason}), and torch {torch.__version__} "
            "has no API for a backend to request that. Call the optimizer's step "
            "uncompiled"
        )
    raise skip(reason)


@contextlib.contextmanager
def ends_pass() -> Iterator[None]:
    """Within a call of a backend: what ends a graph passes through Dynamo as it is."""
    try:
        yield
    except Exception as error:
        kind = _passing()
        if kind is None or not isinstance(error, kind.__mro__[1]):
            raise
        raise kind(error) from None


@functools.cache
def _passing() -> Any:
    """A class of Dynamo's error that ends a graph, which passes from a backend; None
    where there is none.

    Relies on Dynamo's letting exceptions with shortened tracebacks pass.
    """
    shortened = find("torch._dynamo.exc:ShortenTraceback", None)
    ended = find("torch._dynamo.exc:Unsupported", None)
    if shortened is None or ended is None:
        return None

    def take_over(self: Any, error: BaseException) -> None:
        Exception.__init__(self, *error.args)
        self.__dict__.update(vars(error))
        self.first_useful_frame = None

    try:
        return type("StepInEager", (ended, shortened), {"__init__": take_over})
    except TypeError:
        return None


def refusal_of(optimizer: torch.optim.Optimizer) -> str:
    """Why Dynamo may not trace a step, as its trace has shown; "" if it may."""
    return watched.refused.get(optimizer, "")


def refuse_step(optimizers: list[torch.optim.Optimizer], why: str) -> NoReturn:
    """Called with a graph of a step that must run in eager: from now on it does.

    Raises CaptureError where what is traced stands for an optimizer, and else what has
    Dynamo skip the frame.
    """
    for owner in optimizers:
        watched.refused.setdefault(owner, why)
    if tracing.given:
        raise CaptureError(why)
    skip_frame(why, whole=not any(map(holds_others, optimizers)))


def refuse(tx: Any, why: str) -> NoReturn:
    """End the trace of a step that Dynamo would compile to something else than eager.

    From now on the step runs in eager, which is reported at once: Dynamo may leave the
    step without beginning it again. Raises Dynamo's exception that ends a graph.
    """
    now = getattr(tx.output, "current_tx", tx)
    reason = f"{why} ({now.f_code.co_filename}:{now.lineno})"
    tracing.refusal = reason
    for owner in tracing.owners:
        watched.tell_of_refusal(owner, watched.refused.setdefault(owner, reason))
    whole = not any(map(holds_others, tracing.owners)) and _is_step(tx)
    leave_to_eager(reason, whole)
    raise AssertionError("Dynamo continued a graph after its end")


def _is_step(tx: Any) -> bool:
    """Does a trace begin at the step of an optimizer?"""
    code = tx.output.root_tx.f_code
    return any(is_step_of(code, owner) for owner in tracing.owners)
