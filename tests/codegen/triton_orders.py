"""Runs a Triton kernel's programs in other orders than the interpreter's own.

A GPU promises no order: its programs run in turns, and what one stores the others may
see late, until it releases. `running(how)` is a context in which launches in the
interpreter go that way:

    "forward", "backward"   one program after the other
    "late"                  the same, but stores wait in the program that made them
                            until its next atomic that releases; if there is none,
                            until all programs are over
    a number                as "late", and seeds the turns: at each access of memory
                            another program may go on

So whatever a kernel gives must be the same in all of them; a race shows as other bits.
Loads are not delayed: what an acquire is for cannot be seen here.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest


class _Program(threading.Thread):
    """One program: it goes on when it is told to, and stops at its next access."""

    def __init__(self, work: Callable[[], None], place: tuple[int, int, int]) -> None:
        super().__init__(daemon=True)
        self.work, self.place = work, place
        self.go, self.stopped = threading.Semaphore(0), threading.Semaphore(0)
        #: stores that nobody else sees yet, with their addresses
        self.waiting: list[tuple[Any, Callable[[], object]]] = []
        self.error: BaseException | None = None
        self.over = self.done = False

    def run(self) -> None:
        self.go.acquire()
        try:
            with np.errstate(all="ignore"):
                self.work()
                self.over = True
                if self.waiting:
                    self.pause()
                self.flush()
        except BaseException as error:
            self.error = error
        self.done = True
        self.stopped.release()

    def turn(self) -> None:
        """Let it run until its next access of memory."""
        self.go.release()
        self.stopped.acquire()

    def pause(self) -> None:
        self.stopped.release()
        self.go.acquire()

    def flush(self) -> None:
        for _, store in self.waiting:
            store()
        self.waiting.clear()


def _as_entry(fn: Any, call: Callable[[dict[str, Any]], None]) -> Any:
    """A function with the parameters and globals of `fn` that hands them to `call`."""
    names = list(fn.__code__.co_varnames[: fn.__code__.co_argcount])
    given = ", ".join(f"{n!r}: {n}" for n in names)
    local: dict[str, Any] = {}
    fn.__globals__["_call_of_programs"] = call
    text = f"def entry({', '.join(names)}):\n    _call_of_programs({{{given}}})\n"
    exec(text, fn.__globals__, local)
    entry = local["entry"]
    entry.__annotations__ = fn.__annotations__
    return entry


@contextlib.contextmanager
def running(how: str | int) -> Iterator[None]:
    """Launches in this context run their programs in the order `how`."""
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder

    builder = interpreter.interpreter_builder
    plain = {
        name: getattr(InterpreterBuilder, name)
        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw")
    }
    rng = random.Random(how)
    seeded = isinstance(how, int)
    late = seeded or how == "late"
    current: list[_Program] = []

    def load(self: Any, *args: Any) -> Any:
        if late and current:
            own = current[0]
            if seeded:
                own.pause()
            if any(np.isin(args[0].data, places).any() for places, _ in own.waiting):
                own.flush()  # its own stores it sees
        return plain["create_masked_load"](self, *args)

    def store(self: Any, *args: Any) -> Any:
        if not (late and current):
            return plain["create_masked_store"](self, *args)
        if seeded:
            current[0].pause()
        then = functools.partial(plain["create_masked_store"], self, *args)
        current[0].waiting.append((args[0].data, then))
        return None

    def atomic(
        self: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, x: Any
    ) -> Any:
        if late and current:
            own = current[0]
            if seeded:
                own.pause()
            if "REL" in str(sem).upper() and "RELAXED" not in str(sem).upper():
                own.flush()
        return plain["create_atomic_rmw"](self, op, ptr, val, mask, sem, x)

    def programs(fn: Any, calls: list[tuple[dict[str, Any], Any]]) -> None:
        """Run one call of `fn` for each program of a grid."""
        todo = [_Program(lambda a=a: fn(**a), place) for a, place in calls]
        for p in todo:
            p.start()
        if how == "backward":
            todo.reverse()
        alive = list(todo)
        while alive:
            p = rng.choice(alive) if seeded else alive[0]
            current[:] = [p]
            builder.grid_idx = p.place
            p.turn()
            if p.error is not None:
                raise p.error
            if p.done or p.over:
                alive.remove(p)
        for p in todo:
            if not p.done:
                p.turn()
        current.clear()

    executor = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        fn, calls = self.fn, []
        (count,) = self.grid

        def collect(given: dict[str, Any]) -> None:
            calls.append((given, builder.grid_idx))
            if len(calls) == count:
                programs(fn, calls)

        self.fn = _as_entry(fn, collect)
        try:
            return executor(self, *args, **kwargs)
        finally:
            self.fn = fn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", load)
        patch.setattr(InterpreterBuilder, "create_masked_store", store)
        patch.setattr(InterpreterBuilder, "create_atomic_rmw", atomic)
        patch.setattr(interpreter.GridExecutor, "__call__", launch)
        yield
