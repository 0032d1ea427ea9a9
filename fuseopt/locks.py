"""Locks that a forked process finds open, even if another thread held them.

The thread that held a lock does not exist in the forked process, so it would never be
released there. The work of that thread is cut off. The owner of such a lock therefore
starts anew, with new guards too, since Dynamo's own guards may hold locked locks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
#: A weak reference to the object of a method, and the method's function.
Method = tuple["weakref.ref[Any]", Callable[[Any], None]]


class Locks:
    """Locks of a process, each with the function by which its owner starts anew."""

    def __init__(self) -> None:
        self.made: weakref.WeakKeyDictionary[Any, Method | None] = (
            weakref.WeakKeyDictionary()
        )
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self.open)

    def open(self) -> None:
        """Open the locks held by threads that the forked process does not have."""
        for lock, method in [*self.made.items()]:
            if lock.acquire(blocking=False):
                # unless the thread that survives in this process holds it
                lock.release()
                continue
            lock._at_fork_reinit()
            owner = None if method is None else method[0]()
            if method is not None and owner is not None:
                method[1](owner)

    def note(self, lock: T, begin_anew: Any = None) -> T:
        """Register a lock, and return it."""
        if hasattr(lock, "_at_fork_reinit"):
            method = None
            if begin_anew is not None:
                method = weakref.ref(begin_anew.__self__), begin_anew.__func__
            self.made[lock] = method
        return lock


locks = Locks()


def new_lock() -> threading.Lock:
    """Return a threading.Lock that a forked process finds open."""
    return locks.note(threading.Lock())


def new_rlock(begin_anew: Callable[[], None] | None = None) -> Any:
    """Return a threading.RLock that a forked process finds open.

    `begin_anew`: a method of the lock's owner. The forked process calls it if another
    thread held the lock.
    """
    return locks.note(threading.RLock(), begin_anew)


__all__ = ["new_lock", "new_rlock"]
