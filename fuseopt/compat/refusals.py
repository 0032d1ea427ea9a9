"""Pass errors of fuseopt through Dynamo unchanged to the caller of the step."""

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
    """Pass errors of fuseopt to the caller unchanged: their class, their text.

    Dynamo wraps any other exception of a backend in one of its errors. The text then
    begins with the backend's name and ends with how to report it to PyTorch. Dynamo
    does not wrap exceptions derived from that very class. fuseopt relies on this, and
    on the method by which Dynamo shortens their tracebacks. If that differs, the caller
    gets the wrapped error.
    """
    try:
        yield
    except Exception as error:
        # imported only for an error, to keep the import light
        from ..errors import FuseoptError

        if not isinstance(error, FuseoptError):
            raise
        # tracebacks begin where the context was entered: after it, and contextlib
        converted = _passed(error, backend, sys._getframe(2))
        if converted is None:
            raise
        raise converted from error.__cause__


def _passed(
    error: FuseoptError, backend: Callable[..., Any], frame: types.FrameType
) -> Exception | None:
    """Return the same error in a form that Dynamo lets through, or None.

    None if it has that form already, or cannot have it.
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
    """Return a class that derives from fuseopt's error and Dynamo's for a failed
    backend.
    """

    def text(self: Any) -> str:
        return str(self.inner_exception)  # without Dynamo's additions to its arguments

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
