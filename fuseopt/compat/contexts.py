"""Settings of torch while Dynamo traces, and the context variables they leave.

In torch 2.13 each use of `config.patch` makes a new context variable. It stays in the
context of the thread for ever, as an empty tuple. torch 2.11 makes none.
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
    """Patch a config in this thread, as `config.patch(**values)`, and leave nothing
    behind.
    """
    before = {name: getattr(config, name) for name in values}
    try:
        for name, value in values.items():
            setattr(config, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)


def scalar_outputs() -> Any:
    """Return a context in which this thread's graphs may contain `.item()`."""
    config = find("torch._dynamo:config", None)
    if not hasattr(config, "capture_scalar_outputs"):
        return contextlib.nullcontext()
    return setting(config, capture_scalar_outputs=True)


def within_copy(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` in a copy of the context, and keep the variables that it sets.

    Variables of ended patches are dropped. Relies on how patches name their variables.
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
