"""Step buckets on a second thread, beside the backward."""

from __future__ import annotations

import collections
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from ..errors import ConfigError
from ..runtime.run_tables import processors


class Steps(Protocol):
    """Steps of some parameters of an optimizer: see `Stepper`.

    `kept` is the number of sets of lanes that are kept. `frees`: free the gradients.
    """

    kept: int
    frees: bool

    def refresh(self) -> None:
        """Read the kinds of parameters, and prove the step for new ones."""

    def forget(self) -> None:
        """Release what was compiled for a state that has been replaced."""

    def step(self, params: Sequence[torch.Tensor]) -> None:
        """Step the parameters that have a gradient, and free it if `frees`."""

    def wait(self) -> None:
        """Return when all steps are done; raise the error of one that failed."""


class OnThread:
    """Steps that run on a thread, in the order of the calls. Their kernels use
    `threads` threads.

    A thread that reads or writes the parameters calls `wait` first. If a step fails,
    those after it are left out until `wait` has raised its error: their gradients stay.

    The threads of the backward free gradients, with the next bucket. A hook that reads
    one while another thread frees it would crash.
    """

    frees = True

    def __init__(self, steps: Steps, threads: int) -> None:
        self._steps, self._threads = steps, threads
        steps.frees = False
        self._pool: ThreadPoolExecutor | None = None
        #: the process that made the pool: a forked one has not its thread
        self._process = 0
        self._thread = 0
        self._failed = False
        self._waiting: list[Future[None]] = []
        self._next: collections.deque[Sequence[torch.Tensor]] = collections.deque()
        #: those that are stepped and have gradients
        self._done: collections.deque[Sequence[torch.Tensor]] = collections.deque()

    @property
    def kept(self) -> int:
        """Return the number of sets of lanes that are kept."""
        return self._steps.kept

    @kept.setter
    def kept(self, n: int) -> None:
        self._steps.kept = n

    def refresh(self) -> None:
        """See Steps."""
        self.wait()
        self._steps.refresh()

    def forget(self) -> None:
        """See Steps."""
        self.wait()
        self._steps.forget()

    def step(self, params: Sequence[torch.Tensor]) -> None:
        """Begin to step the parameters that have a gradient."""
        self._free()
        if all(p.grad is None for p in params):
            return
        if self._pool is None or self._process != os.getpid():
            self._pool = self._started()
            self._process, self._failed = os.getpid(), False
            self._waiting = []
            self._next.clear()
            self._done.clear()
        self._next.append(params)
        self._waiting.append(self._pool.submit(_run, weakref.ref(self)))

    def _started(self) -> ThreadPoolExecutor:
        """Return a pool of one thread, whose kernels use `threads` threads."""
        mine = torch.get_num_threads()
        pool = ThreadPoolExecutor(1, "fuseopt-step")
        # torch sets the number of a new thread when that first reads it
        pool.submit(torch.get_num_threads).result()
        pool.submit(torch.set_num_threads, self._threads).result()
        # that number is of the thread, but threads made later would begin with it
        torch.set_num_threads(mine)
        return pool

    def run_next(self) -> None:
        """Step the bucket that waits longest, on the thread."""
        self._thread = threading.get_ident()
        params = self._next.popleft()
        if self._failed:
            return
        try:
            self._steps.step(params)
            self._done.append(params)
        except BaseException:
            self._failed = True
            raise

    def settle(self) -> None:
        """Return when all steps have ended; leave errors to `wait`. On the thread
        itself, do nothing.
        """
        if self._process == os.getpid() and self._thread != threading.get_ident():
            for step in [*self._waiting]:
                step.exception()
            self._free()

    def _free(self) -> None:
        """Free the gradients of buckets that are stepped."""
        while self._done:
            for p in self._done.popleft():
                p.grad = None

    def wait(self) -> None:
        """Return when all steps are done; raise the first error."""
        if self._process != os.getpid() or self._thread == threading.get_ident():
            self._steps.wait()
            return
        self.settle()
        waiting, self._waiting, self._failed = self._waiting, [], False
        self._steps.wait()
        for step in waiting:
            step.result()


def threads_of(thread: Any, on_cpu: bool) -> int:
    """Return the number of threads for steps: `thread`, or with True as many as torch
    uses. If no backward is computed `on_cpu`, it is this process's part of the
    processors, though a launcher has set OMP_NUM_THREADS=1. 0: there is no thread.

    Raises ConfigError for other values.
    """
    if not isinstance(thread, int) or thread < 0:
        raise ConfigError(f"thread={thread!r}: expected True, False or a number")
    if thread is not True:
        return thread
    if on_cpu:
        return torch.get_num_threads()
    local = os.environ.get("LOCAL_WORLD_SIZE", "1")
    processes = int(local) if local.isdigit() else 1
    return max(1, len(processors()) // max(1, processes))


def _run(of: weakref.ref[OnThread]) -> None:
    """Step the next bucket, unless the optimizer is gone. The pool's thread may keep
    the arguments of its last call.
    """
    steps = of()
    if steps is not None:
        steps.run_next()
