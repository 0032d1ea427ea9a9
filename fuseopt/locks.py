"""Locks that are open in a process which was forked while another thread held them.

That thread does not exist there, so nobody would ever open them. What it was doing is
cut off in that process: the owner of such a lock begins anew, with other guards too,
since Dynamo has locks of its own in those that it was asked.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
#: The object that a method belongs to, weakly, and the method's function.
Method = tuple["weakref.ref[Any]", Callable[[Any], None]]


class Locks:
    """All locks of a process; and how the owner of each begins anew."""

    def __init__(self) -> None:
        self.made: weakref.WeakKeyDictionary[Any, Method | None] = (
            weakref.WeakKeyDictionary()
        )
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.open)

    def open(self) -> None:
        """Open those that a thread holds which a forked process does not have."""
        for lock, method in [*self.made.items()]:
            if lock.acquire(blocking=False):
                lock.release()  # or the thread that goes on in this process has it
                continue
            lock._at_fork_reinit()
            owner = None if method is None else method[0]()
            if method is not None and owner is not None:
                method[1](owner)

    def note(self, lock: T, begin_anew: Any = None) -> T:
        """Take a lock among them, and return it."""
        if hasattr(lock, "_at_fork_reinit"):
            method = None
            if begin_anew is not None:
                method = weakref.ref(begin_anew.__self__), begin_anew.__func__
            self.made[lock] = method
        return lock


locks = Locks()


def new_lock() -> threading.Lock:
    """A threading.Lock that a forked process finds open."""
    return locks.note(threading.Lock())


def new_rlock(begin_anew: Callable[[], None] | None = None) -> Any:
    """A threading.RLock that a forked process finds open. `begin_anew`: a method of the
    lock's owner, called where another thread held it.
    """
    return locks.note(threading.RLock(), begin_anew)


__all__ = ["new_lock", "new_rlock"]
