"""Pause the garbage collector while a step is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Compiling makes many small objects that live on: to look for garbage among them,
    and among all that torch holds, again and again, would take longer than making them.

    Contexts may be one within another, and end in any order.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
