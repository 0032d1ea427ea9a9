"""Omit Dynamo's timing of its guards, which evicts the processor's caches."""

from __future__ import annotations

import logging
from typing import Any

from .names import find
from .patches import Hook, Patcher, patch
from .tracing import traces_step


@patch(
    "untimed-guards",
    "guards are not timed",
    "each trace takes some 50 ms longer",
)
def UNTIMED_GUARDS(patcher: Patcher) -> None:
    """Do not time the guards of a traced step.

    The time appears only in Dynamo's logs. To measure it, Dynamo evicts the processor's
    caches, with all other data. That takes some 50 ms, longer than building the guards.
    If these logs are on, the time is measured.
    """
    guards = find("torch._dynamo.guards")
    log = find("torch._dynamo.guards:guards_log")
    structured = find("torch._logging._internal:trace_log")

    def latency(original: Hook, *args: Any, **kwargs: Any) -> Any:
        read = log.isEnabledFor(logging.DEBUG) or structured.handlers
        return 0.0 if traces_step() and not read else original(*args, **kwargs)

    patcher.around(guards, "profile_guard_manager", latency)
