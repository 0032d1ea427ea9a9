"""Ranges of torch's profiler."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import profiler

from .names import find

_FAST: Any = find("torch._C:_profiler._RecordFunctionFast", None)


#: A function of C, since each call runs it: True while a profiler of torch records this
#: process. Relies on a flag that torch's profilers set.
profiled: Callable[[], bool] = functools.partial(
    getattr, profiler, "_is_profiler_enabled", False
)


def profiler_range(name: str) -> Any:
    """Return a range with a name, to be entered once: in C alone if torch has that."""
    return torch.profiler.record_function(name) if _FAST is None else _FAST(name)
