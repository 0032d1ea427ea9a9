"""Make Dynamo run code in eager that it begins to trace."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from ..errors import CaptureError
from .names import find
from .owners import holds_others, is_step_of
from .patch_state import patch_state
from .tracing import tracing


def leave_to_eager(reason: str, whole: bool = False) -> None:
    """Make Dynamo run the code that it begins to trace in eager, from now on.

    `whole`: also all code that it calls. Raises Dynamo's exception that ends a graph.
    If torch has no function for that, raises the exception with which a backend skips a
    frame.
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
            pass  # its signature differs
        except Exception as error:
            if whole:
                _skip_what_is_called(error)
            raise
    skip_frame(reason)


def _skip_what_is_called(error: Any) -> None:
    """Make Dynamo skip all that a frame calls, too; it reads this from an exception."""
    strategy = find("torch._dynamo.types:FrameExecStrategy", None)
    skip = find("torch._dynamo.types:FrameAction.SKIP", None)
    if strategy is not None and skip is not None:
        error.frame_exec_strategy = strategy(skip, skip)


def skip_frame(reason: str, whole: bool = False) -> NoReturn:
    """Make Dynamo run a graph's frame in eager, from now on; called with the graph.

    `whole`: also all code that it calls. Raises UnsupportedTorch if torch has no
    exception for that; nothing ran yet.
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
    """Let exceptions that end a graph pass unchanged through Dynamo's call of a
    backend.
    """
    try:
        yield
    except Exception as error:
        kind = _passing()
        if kind is None or not isinstance(error, kind.__mro__[1]):
            raise
        raise kind(error) from None


@functools.cache
def _passing() -> Any:
    """Return a class of Dynamo's graph-ending error that passes from a backend, or
    None.

    Relies on Dynamo letting exceptions with shortened tracebacks pass.
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
    """Return why Dynamo may not trace a step, as its trace has shown, or ""."""
    return patch_state.refused.get(optimizer, "")


def refuse_step(optimizers: list[torch.optim.Optimizer], why: str) -> NoReturn:
    """Make a step run in eager from now on; called with its graph.

    Raises CaptureError if a stand-in of an optimizer is traced; otherwise makes Dynamo
    skip the frame.
    """
    for owner in optimizers:
        patch_state.refused.setdefault(owner, why)
    if tracing.given:
        raise CaptureError(why)
    skip_frame(why, whole=not any(map(holds_others, optimizers)))


def refuse(tx: Any, why: str) -> NoReturn:
    """End the trace of a step for which Dynamo's code would differ from eager.

    From now on the step runs in eager, which fuseopt reports at once: Dynamo may leave
    the step without tracing it again. Raises Dynamo's exception that ends a graph.
    """
    now = getattr(tx.output, "current_tx", tx)
    reason = f"{why} ({now.f_code.co_filename}:{now.lineno})"
    tracing.refusal = reason
    for owner in tracing.owners:
        patch_state.report_refusal(owner, patch_state.refused.setdefault(owner, reason))
    whole = not any(map(holds_others, tracing.owners)) and _is_step(tx)
    leave_to_eager(reason, whole)
    raise AssertionError("Dynamo continued a graph after its end")


def _is_step(tx: Any) -> bool:
    """Does a trace begin at the step of an optimizer?"""
    code = tx.output.root_tx.f_code
    return any(is_step_of(code, owner) for owner in tracing.owners)
