"""Autocast around a recorded call, and the casts that it caches for the caller.

Under autocast, ATen casts the arguments of some calls, and runs another call on the
casts. fuseopt records a step below autocast, so that the casts are separate calls. Each
recorded call later also runs below autocast, with the state of autocast that it had.

For a parameter (a leaf that requires a gradient) autocast caches the cast until its
context ends, even if the parameter changes meanwhile. The forward and the step share
that memory, which belongs to the caller. So autocast itself makes such a cast at each
call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ...compat import DISPATCH_MODE


class Autocast(NamedTuple):
    """Devices for which autocast is on, out of `kinds`, each with its dtype."""

    kinds: tuple[str, ...]
    on: tuple[tuple[str, torch.dtype], ...]


def autocast_of(kinds: Iterable[str]) -> Autocast:
    """Return the state of autocast in this thread, for these kinds of devices."""
    kinds = tuple(kinds)
    on = [(k, torch.get_autocast_dtype(k)) for k in kinds if _is_on(k)]
    return Autocast(kinds, tuple(on))


def _is_on(kind: str) -> bool:
    return torch.is_autocast_enabled(kind)


@dataclass(frozen=True)
class WithinAutocast:
    """Calls a function with the state of autocast that a recorded call had."""

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
    """Captures the first argument of the first call that is no cast, without running
    it.
    """

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
    """Function of an extern: autocast's cached cast of a tensor of the caller.

    A product of matrices casts its arguments before it checks their shapes. The product
    itself does not run.
    """

    dtype: torch.dtype

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        with _Caught() as caught:
            torch.ops.aten.mm.default(t, t)
        cast: torch.Tensor = caught.tensor
        return cast


__all__ = ["Autocast", "KeptCast", "WithinAutocast", "autocast_of"]
