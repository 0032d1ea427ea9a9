"""Pause the garbage collector while a step is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector within this context.

    Compiling allocates many small objects that stay alive. Searching these and all that
    torch holds for garbage, again and again, takes longer than allocating them.
    Contexts may be nested, and end in any order.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
