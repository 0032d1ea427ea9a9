"""Exceptions that handlers of signals raise, such as a TimeoutError after `alarm`.

Python runs a handler between two instructions, so the exception comes out of the code
that runs then. Code that handles all exceptions of a call would lose it: Dynamo does so
in a trace, and fuseopt around it. `passing` makes it an `Interrupted`, which is no
Exception. The outermost `passing` raises the handler's exception.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any


class Interrupted(BaseException):
    """Carries the exception that a signal handler `raised`."""

    def __init__(self, raised: Exception) -> None:
        super().__init__(str(raised))
        self.raised = raised


class _Passing:
    """A handler whose exceptions are Interrupted, as long as it is `on`."""

    def __init__(self, handler: Callable[..., Any]) -> None:
        self.handler = handler
        self.on = True

    def __call__(self, number: int, frame: types.FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except Exception as error:
            if not self.on:
                raise
            raise Interrupted(error) from None


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """Within, what a handler of a signal raises is an Interrupted. The outermost
    context raises what the handler raised.

    Only the main thread runs handlers. `signal.signal`, which is called for each of the
    user's handlers, undoes a `signal.siginterrupt(number, False)`.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {n: _Passing(h) for n, h in _of_python().items()}
    try:
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            yield
        finally:
            for handler in handlers.values():
                handler.on = False
            for number, handler in handlers.items():
                still = signal.getsignal(number) is handler
                if still:
                    signal.signal(number, handler.handler)
    except Interrupted as error:
        if not handlers:  # a context around this one has them
            raise
        raise error.raised from None


def _of_python() -> dict[int, Callable[..., Any]]:
    """The handlers that may raise an Exception: those that Python code has set."""
    found: dict[int, Callable[..., Any]] = {}
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and _code(handler) is not None:
            if not isinstance(handler, _Passing):
                found[number] = handler
    return found


def of_handler(error: BaseException) -> BaseException | None:
    """The exception among an error and its causes that a handler of a signal raised,
    None if there is none.
    """
    codes = {*map(_code, map(signal.getsignal, signal.valid_signals()))} - {None}
    seen: set[int] = set()
    one: BaseException | None = error
    while codes and one is not None and id(one) not in seen:
        seen.add(id(one))
        if not codes.isdisjoint(_codes(one)):
            return one
        one = one.__cause__ or one.__context__
    return None


def reraise(error: BaseException) -> None:
    """Raise what a handler of a signal raised, if `error` comes from that."""
    raised = of_handler(error)
    if raised is not None:
        raise raised


def _codes(error: BaseException) -> Iterator[types.CodeType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next


def _code(handler: Any) -> types.CodeType | None:
    """The code that Python runs for a handler; None for one that is not Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, (types.FunctionType, types.MethodType)):
        handler = vars(type(handler)).get("__call__")
    return getattr(getattr(handler, "__func__", handler), "__code__", None)
