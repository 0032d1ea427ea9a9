"""Leave out Dynamo's timing of its guards, which empties the processor's caches."""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any

from .tracing import traces_step


def leave_guards_untimed() -> None:
    """While a step is traced for fuseopt, do not time the guards that were built.

    The time stands in Dynamo's logs alone. To take it, Dynamo empties the processor's
    caches, which takes longer than to build the guards: some 50 ms, of all the other
    data too. Where somebody reads these logs it is taken. Relies on the function with
    which Dynamo times, and on the logs that hold its result; where they have other
    names, guards are timed.
    """
    try:
        guards: Any = importlib.import_module("torch._dynamo.guards")
        measure = guards.profile_guard_manager
        log = guards.guards_log
        structured = importlib.import_module("torch._logging._internal").trace_log
    except (ImportError, AttributeError):
        return

    @functools.wraps(measure)
    def latency(*args: Any, **kwargs: Any) -> Any:
        read = log.isEnabledFor(logging.DEBUG) or structured.handlers
        if traces_step() and not read:
            return 0.0
        return measure(*args, **kwargs)

    guards.profile_guard_manager = latency
