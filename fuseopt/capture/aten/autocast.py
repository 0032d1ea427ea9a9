"""Autocast around a recorded call, and the casts that it keeps for the caller.

Where autocast is on, ATen casts the arguments of some calls, and what runs in the end
is another call on the casts. A step is recorded below that: the casts are calls of
their own. So each recorded call also runs below it, with autocast as it was there.

Of a parameter (a leaf that requires a gradient) autocast keeps the cast until its
context ends, even if the parameter changes meanwhile. That memory is the caller's: the
forward and the step share it. Such a cast is made by autocast itself at each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...compat import DISPATCH_MODE


class Autocast(NamedTuple):
    """For devices of which `kinds` autocast is on, with the dtypes that it casts to."""

    kinds: tuple[str, ...]
    on: tuple[tuple[str, torch.dtype], ...]


def autocast_of(kinds: Iterable[str]) -> Autocast:
    """What is on in this thread, of these kinds of devices."""
    kinds = tuple(kinds)
    on = [(k, torch.get_autocast_dtype(k)) for k in kinds if _is_on(k)]
    return Autocast(kinds, tuple(on))


def _is_on(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)


@dataclass(frozen=True)
class Within:
    """A function that is called with autocast as it was where a call was recorded."""

    function: Callable[..., Any]
    autocast: Autocast

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kinds, on = self.autocast
        before = [(k, _is_on(k), torch.get_autocast_dtype(k)) for k in kinds]
        wanted = dict(on)
        try:
            for kind, _, dtype in before:
                torch.set_autocast_enabled(kind, kind in wanted)
                torch.set_autocast_dtype(kind, wanted.get(kind, dtype))
            return self.function(*args, **kwargs)
        finally:
            for kind, was_on, dtype in before:
                torch.set_autocast_enabled(kind, was_on)
                torch.set_autocast_dtype(kind, dtype)


class _Caught(DISPATCH_MODE):  # type: ignore[misc]
    """Takes the first argument of the first call that is no cast, and runs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.tensor: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.ops.aten.mm.default:
            return func(*args, **(kwargs or {}))
        self.tensor = args[0]
        return args[0]


@dataclass(frozen=True)
class KeptCast:
    """The function of an extern: autocast's cast of a tensor of the caller's.

    A product of matrices has its arguments cast before anything asks for their shapes;
    the product itself is not run.
    """

    dtype: torch.dtype

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        with _Caught() as caught:
            torch.ops.aten.mm.default(t, t)
        cast: torch.Tensor = caught.tensor
        return cast


__all__ = ["Autocast", "KeptCast", "Within", "autocast_of"]
