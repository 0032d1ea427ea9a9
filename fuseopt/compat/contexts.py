"""Settings of torch's while Dynamo traces, and the context variables they leave.

In torch 2.13 each use of `config.patch` has a context variable of its own, and leaves
it in the context of the thread for ever, as an empty tuple. torch 2.11 has none.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

from .names import find

_MISSING = object()


@contextlib.contextmanager
def setting(config: Any, **values: Any) -> Iterator[None]:
    """What `config.patch(**values)` does, in this thread too; nothing is left of it."""
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def scalar_outputs() -> Any:
    """A context in which Dynamo takes `.item()` into its graphs, in this thread."""
    config = find("torch._dynamo:config", None)
    if not hasattr(config, "capture_scalar_outputs"):
        return contextlib.nullcontext()
    return setting(config, capture_scalar_outputs=True)


def within_copy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in a copy of the context, and take over what it sets there, but
    for what patches leave that have ended.

    Relies on how patches name their variables; what others leave is taken over.
    """
    inner = contextvars.copy_context()
    try:
        return inner.run(function, *args, **kwargs)
    finally:
        for variable, value in inner.items():
            current = variable.get(_MISSING)
            if current is value:
                continue
            ended = ".ConfigPatch[" in variable.name and not value
            if current is not _MISSING or not ended:
                variable.set(value)
