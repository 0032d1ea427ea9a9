"""What a step has prepared and not yet done: launches, then what is to be written.

A step that stands for an optimizer's (`shadow`) first runs to its end with all launches
put off: what they are given is checked, what they make has memory, what Python is to
hold afterwards is in fresh dicts. Then `finish` does it all in one call of C: `list`
over a `map` calls the kernels through ctypes and `dict.update` for what is written.
Python runs the handlers of signals, raises what another thread asked for and switches
threads between two instructions of bytecode, of which there is none in between; so an
exception finds a step not begun or done. A kernel lets other threads run while it
computes, as eager's do; what is written after it is written without a switch.

Steps that make calls of ATen or launches of a device are put off as well, and run from
Python: an exception in the middle of those leaves parameters half done, as in eager,
and what Python holds is written all the same, since it belongs to the first launch.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from typing import Any

import torch

from ..errors import LaunchError

_CALL = functools.partial.__call__
#: Partials of C functions, or one function of Python.
Launches = Sequence[Callable[[], object]] | Callable[[], object]


def write(writes: Iterable[Callable[[], object]]) -> None:
    """Do what partials of C functions say, all in one call."""
    every = [*writes]
    list(map(_CALL, every))  # type: ignore[arg-type]


def unless(
    flag: torch.Tensor, writes: Iterable[Callable[[], object]]
) -> Callable[[], object]:
    """Writes that are done unless a flag is true when their turn comes; calls of C."""
    asked = map(operator.not_, map(torch.Tensor.item, repeat(flag)))
    done: Any = map(_CALL, compress(writes, asked))  # type: ignore[arg-type]
    return functools.partial(collections.deque, done, 0)


class Pending:
    """Launches that are put off while this is `open`; `begun`: has one been done?

    `kept`: what is to live until they are done, None as long as none was put off.
    """

    def __init__(self) -> None:
        self.open = False
        self.begun = False
        self.kept: Any = None
        self.ahead: Callable[[Any], Launches] | None = None
        self._first: Launches = ()
        self._launches: Sequence[Callable[[], object]] = ()
        self._by_python: Callable[[], object] | None = None
        #: counts up versions in C; in Python, where that fails or there is none
        self._count: Callable[[], object] | None = None
        self._otherwise: Callable[[], object] | None = None
        self._call = object()

    def start(self, ahead: Callable[[Any], Launches] | None = None) -> object:
        """Put off what comes now; what `finish` is to be given. `ahead`: see `lead`."""
        self.ahead = ahead
        self._first = self._launches = ()
        self._by_python = self._count = self._otherwise = self.kept = None
        self.begun = False
        self.open = True
        self._call = object()
        return self._call

    def drop(self) -> None:
        """Forget what was put off."""
        self.open = False
        self.ahead = None
        self._first = self._launches = ()
        self._by_python = self._count = self._otherwise = self.kept = None

    def put_off(
        self,
        launches: Launches,
        count: Callable[[], object] | None,
        otherwise: Callable[[], object] | None,
        kept: Any,
    ) -> None:
        """Keep what is to be done.

        `count` says whether it failed, then `otherwise` is called. `kept` lives until
        then.
        """
        if callable(launches):
            self._by_python = launches
        else:
            self._launches = launches
        self._count, self._otherwise, self.kept = count, otherwise, (kept,)

    @property
    def launches(self) -> Launches:
        """What was put off."""
        return self._launches if self._by_python is None else self._by_python

    def lead(self, step: Any, waits: bool) -> None:
        """A step is ready, and is put off if it `waits`: prepare what comes before it,
        if there is an `ahead`. That is what it gives, and writes nothing of the user's.
        """
        ahead, self.ahead = self.ahead, None
        assert ahead is not None
        self._first = ahead(step)
        if not waits:
            self._run_first()

    def _run_first(self) -> None:
        first, self._first = self._first, ()
        for call in [first] if callable(first) else first:
            call()

    def finish(self, call: object, writes: Iterable[Callable[[], object]] = ()) -> None:
        """Do it, before `drop`. `writes`: partials of C functions, to run afterwards.

        Raises LaunchError if another step was begun after the one that `start` began.
        """
        after = [*writes]
        if call is not self._call:
            raise LaunchError(
                "while a step ran, another one of the same optimizer was done, by the "
                "handler of a signal; the first one has changed nothing"
            )
        if self._by_python is not None or callable(self._first):
            self._run_first()
        if self._by_python is not None:
            try:
                self.begun = True
                self._by_python()
            finally:
                list(map(_CALL, after))  # type: ignore[arg-type]
            failed: object = True
        else:
            count = [] if self._count is None else [self._count]
            first: Any = self._first
            every = [*first, *self._launches, *after, *count]
            self.begun = True
            done: list[Any] = list(map(_CALL, every))
            failed = self._count is None or done[-1]
        if failed and self._otherwise is not None:
            self._otherwise()
