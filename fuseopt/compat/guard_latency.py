"""Leave out Dynamo's timing of its guards, which empties the processor's caches."""

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
    """While a step is traced, do not time the guards that were built.

    The time stands in Dynamo's logs alone. To take it, Dynamo empties the processor's
    caches, which takes longer than to build the guards: some 50 ms, of all the other
    data too. Where somebody reads these logs it is taken.
    """
    guards = find("torch._dynamo.guards")
    log = find("torch._dynamo.guards:guards_log")
    structured = find("torch._logging._internal:trace_log")

    def latency(original: Hook, *args: Any, **kwargs: Any) -> Any:
        read = log.isEnabledFor(logging.DEBUG) or structured.handlers
        return 0.0 if traces_step() and not read else original(*args, **kwargs)

    patcher.around(guards, "profile_guard_manager", latency)
