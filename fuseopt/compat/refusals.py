"""Let an error of fuseopt's pass through Dynamo unchanged to the caller of the step."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .capability import probed
from .names import Missing, find, takes

if TYPE_CHECKING:
    from ..errors import FuseoptError


@probed(
    "plain-errors",
    "an error of fuseopt's reaches the caller as it is",
    "Dynamo wraps it in another error, whose text holds it",
)
def PLAIN_ERRORS() -> None:
    kind = find("torch._dynamo.exc:BackendCompilerFailed")
    takes(kind.__init__, "self", "backend_fn", "inner_exception")
    takes(kind.remove_dynamo_frames, "self")


@contextlib.contextmanager
def refusals_pass(backend: Callable[..., Any]) -> Iterator[None]:
    """Let errors of fuseopt's reach the caller as they are: their class, their text.

    Dynamo puts any other exception of a backend into one of its own, whose text begins
    with the backend's name and ends with how to report it to PyTorch. Relies on its not
    doing so with exceptions derived from that very class, and on the method by which it
    shortens their tracebacks; where that is another one, the caller gets what Dynamo
    makes of it.
    """
    try:
        yield
    except Exception as error:
        from ..errors import FuseoptError  # light to import, until there is one

        if not isinstance(error, FuseoptError):
            raise
        # tracebacks begin where the context was entered: behind it, and contextlib
        converted = _passed(error, backend, sys._getframe(2))
        if converted is None:
            raise
        raise converted from error.__cause__


def _passed(
    error: FuseoptError, backend: Callable[..., Any], frame: types.FrameType
) -> Exception | None:
    """The same error as one that Dynamo lets through; None if it is one already, or
    cannot be one.
    """
    if sys.modules.get("torch._dynamo") is None or not PLAIN_ERRORS.available():
        return None
    try:
        BackendCompilerFailed = find("torch._dynamo.exc:BackendCompilerFailed")
        if isinstance(error, BackendCompilerFailed):
            return None
        kind: Any = type(error)
        converted: Exception = _kind(kind, BackendCompilerFailed)(backend, error, frame)
    except (Missing, TypeError):
        return None
    return converted.with_traceback(error.__traceback__)


@functools.cache
def _kind(kind: Any, dynamo: Any) -> Any:
    """A class that is both an error of fuseopt's and Dynamo's for a failed backend."""

    def text(self: Any) -> str:
        return str(self.inner_exception)  # whatever Dynamo adds to its arguments

    def shown(self: Any) -> str:
        return repr(self.inner_exception)

    def plain(self: Any) -> Any:
        return type(self.inner_exception), self.inner_exception.args

    def shortened(self: Any) -> Any:
        at = self.__traceback__
        while at is not None and at.tb_frame is not self.first_useful_frame:
            at = at.tb_next
        return self if at is None else self.with_traceback(at)

    named = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__str__": text,
        "__repr__": shown,
        "remove_dynamo_frames": shortened,
        "__reduce__": plain,  # pickled, it is the plain error
    }
    return type(kind.__name__, (kind, dynamo), named)
