"""Commit a step: all its launches, then its writes to dicts, in one C call.

A step that runs in place of an optimizer's (`shadow`) first runs to its end with all
launches deferred. Then their arguments are checked, their results have memory, and the
new entries of Python's dicts are in fresh dicts. `finish` does everything in one C
call: `list` over a `map` calls the kernels through ctypes, then `dict.update` for each
write.

Python runs signal handlers, raises asynchronous exceptions and switches threads between
two instructions of bytecode. The C call has none. So an exception finds a step either
not begun or done. A kernel lets other threads run while it computes, as eager's do. The
writes after it are done without a switch of threads.

Steps with ATen calls or launches on a device are deferred too, and run from Python. An
exception in the middle of them restores all that they wrote (`undo`), and leaves dicts
unchanged. What follows the last of them is one C call again. A step that returns
tensors runs at once, since ATen makes these. An exception before the writes to dicts
restores its tensors too (`protect`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch

from ..errors import LaunchError
from .undo import CALL, Undo

#: Partials of C functions, or one function of Python. The latter gets the partials that
#: follow it.
Launches = Sequence[Callable[[], object]] | Callable[..., object]


def write(writes: Iterable[Callable[[], object]]) -> None:
    """Call partials of C functions, all in one C call."""
    every = [*writes]
    list(map(CALL, every))  # type: ignore[arg-type]


def unless(
    flag: torch.Tensor, writes: Iterable[Callable[[], object]]
) -> Callable[[], object]:
    """Return a C call that does the writes unless the flag is true at that time."""
    unset = map(operator.not_, map(torch.Tensor.item, repeat(flag)))
    done: Any = map(CALL, compress(writes, unset))  # type: ignore[arg-type]
    return functools.partial(collections.deque, done, 0)


def _interrupted() -> LaunchError:
    return LaunchError(
        "a signal handler stepped this optimizer while it was in a step. The "
        "interrupted step has changed nothing; call it again"
    )


class Pending:
    """Launches that are deferred while this is `open`. `begun` is true once one was
    done.

    `kept` has objects to keep alive until they are done, None until one is deferred.
    """

    def __init__(self) -> None:
        self.open = False
        self.begun = False
        self.kept: Any = None
        #: true if a step does only its work on the CPU and launches nothing
        self.refreshing = False
        #: the captures that refreshes are for, once one exists
        self.live: Any = None
        self.launches_before: Callable[[Any], Launches] | None = None
        self._first: Launches = ()
        self._launches: Sequence[Callable[[], object]] = ()
        self._by_python: Callable[..., object] | None = None
        #: increments versions in C; Python does it where that fails or is missing
        self._count: Callable[[], object] | None = None
        self._otherwise: Callable[[], object] | None = None
        self._undo: Undo | None = None
        #: the object of the last call that began
        self._call = [object()]

    @contextlib.contextmanager
    def without_launches(self) -> Iterator[None]:
        """Restrict a step within the context to its work on the CPU; see `live`."""
        self.refreshing = True
        try:
            yield
        finally:
            self.refreshing = False

    def start(self, launches_before: Callable[[Any], Launches] | None = None) -> object:
        """Defer launches from now on. Return the argument for `finish`.

        `launches_before` returns launches that come before a step: see `lead`.
        """
        # first, for a signal handler's step clears what follows
        self._call[0] = call = object()
        self.launches_before = launches_before
        self._first = self._launches = ()
        self._by_python = self._count = self._otherwise = self._undo = self.kept = None
        self.begun, self.open = False, True
        return call

    def within(self, call: object, *calls: Iterable[Any]) -> list[Any]:
        """Return calls of C that begin a call whose launches are not deferred, make
        these calls, and raise ValueError if another step began meanwhile.
        """
        begin = functools.partial(self._call.__setitem__, 0, call)
        return [begin, *chain(*calls), functools.partial(self._call.index, call)]

    def is_last(self, call: object) -> bool:
        """Return whether no step began after this call."""
        return call is self._call[0]

    def drop(self) -> None:
        """Forget the deferred launches, and that a launch was done.

        Restores the protected tensors unless `finish` has begun the writes.
        """
        if self._undo is not None:
            self._put_back()
        self.open = self.begun = False
        self.launches_before = None
        self._first = self._launches = ()
        self._by_python = self._count = self._otherwise = self.kept = None

    def protect(self, tensors: list[torch.Tensor]) -> None:
        """Copy tensors before a launch that writes them and is not deferred."""
        undo = Undo([t.detach() for t in tensors])
        undo.__enter__()
        self._undo = undo

    def _put_back(self) -> bool:
        """Restore the protected tensors. Return False if that is impossible."""
        undo, self._undo = self._undo, None
        return undo is not None and undo.put_back()

    def check_unbegun(self, error: Exception) -> None:
        """Raise LaunchError if a launch was done before a refusal, and cannot be
        undone. A second attempt would then be a second step.
        """
        if self.begun and not self._put_back():
            raise LaunchError(
                "the step has written parameters, and the optimizer's state cannot be "
                f"written: {error}. Load a checkpoint, and run this step uncompiled."
            ) from error

    def check(self, call: object) -> None:
        """Raise LaunchError if another step began after the one that `start` began."""
        if call is not self._call[0]:
            raise _interrupted()

    def put_off(
        self,
        launches: Launches,
        count: Callable[[], object] | None,
        otherwise: Callable[[], object] | None,
        kept: Any,
    ) -> None:
        """Take launches, which `finish` will do.

        It calls `count` after them. A true result of `count` is a failure; then it
        calls `otherwise`. `kept` is kept alive until then.
        """
        if callable(launches):
            self._by_python = launches
        else:
            self._launches = launches
        self._count, self._otherwise, self.kept = count, otherwise, (kept,)

    @property
    def launches(self) -> Launches:
        """Deferred launches."""
        return self._launches if self._by_python is None else self._by_python

    def lead(self, step: Any, waits: bool) -> None:
        """Prepare the launches before a step that is ready; `launches_before(step)`
        returns these. `waits` is true if the step is deferred. The launches write no
        tensors of the user's.
        """
        launches_before, self.launches_before = self.launches_before, None
        if launches_before is None:
            raise _interrupted()
        self._first = launches_before(step)
        if not waits:
            self._run_first()

    def _run_first(self) -> None:
        first, self._first = self._first, ()
        for call in [first] if callable(first) else first:
            call()

    def finish(self, call: object, writes: Iterable[Callable[[], object]] = ()) -> None:
        """Do all launches, before `drop`. `writes` are partials of C functions, called
        after the launches.

        Raises LaunchError if another step began after the one that `start` began.
        """
        after = [*writes]
        if self.refreshing and after:
            raise LaunchError(
                "fuseopt.refresh cannot follow this step: Python writes entries of the "
                "optimizer's state or groups in it. Run a step first, which makes the "
                "state, and keep its numbers in tensors"
            )
        if self._undo is not None:
            after.insert(0, self._undo.done)
        if self._by_python is not None or callable(self._first):
            self.check(call)
            self._run_first()
        if self._by_python is not None:
            self.begun = True
            self._by_python(after)
            failed: object = self._count is None or self._count()
        else:
            failed = self._finish_in_c(call, after)
        if failed and self._otherwise is not None:
            self._otherwise()

    def _finish_in_c(
        self, call: object, after: Sequence[Callable[[], object]]
    ) -> object:
        """Do `finish` in one C call; return a true value if it counted no versions.

        A signal handler may step the optimizer before the C call, but not within it. So
        the first thing that it does is to compare the call with the last one that
        began: `index` raises ValueError if they differ.
        """
        first: Any = self._first
        count = [] if self._count is None else [self._count]
        last = functools.partial(self._call.index, call)
        every = [last, *first, *self._launches, *after, *count]
        self.begun = True
        try:
            done: list[Any] = list(map(CALL, every))
        except ValueError:
            self.begun = call is self._call[0]
            self.check(call)
            raise
        return not count or done[-1]
