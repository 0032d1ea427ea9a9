"""Pause the garbage collector while a step is compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Disable the garbage collector within this context.

    A compilation allocates many small objects that stay alive. Repeated collections of
    these and of torch's objects take longer than the allocations. Contexts may be
    nested, and end in any order.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
