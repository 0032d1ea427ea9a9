"""The ChangePolicy of steps that eager cannot replace: a part of what was called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CaptureError, FuseoptError
from ..runtime.binding import Binding
from ..runtime.guards.tensors import CHANGED
from .keys import LanesDiffer


class LanesChanged(FuseoptError):
    """Lanes differ from the last survey; nothing was written yet."""


def follow(bound: Binding, metadata: list[Any], found: int) -> None:
    """Follow all changes."""


def survey_again(bound: Binding, metadata: list[Any], found: int) -> None:
    """Raise LanesChanged if tensors have another layout: lanes may differ now."""
    # without a guard, the last call was interrupted: that is no change
    if (found & CHANGED and bound.guard is not None) or metadata != bound.metadata:
        raise LanesChanged


def _raised(error: Exception, args: Sequence[Any]) -> bool:
    """Leave errors as they are."""
    return False


class Refusing:
    """Refuses calls that do not fit: raises LanesDiffer before anything is written.

    `shared`: the reason where tensors share memory in a new way. `changed`: what
    follows where a dtype, a shape or a stride is another. `failed`: takes an error of
    fuseopt's own, with the arguments of the call. See ChangePolicy.
    """

    def __init__(
        self,
        shared: str,
        changed: Callable[[Binding, list[Any], int], None] = follow,
        failed: Callable[[Exception, Sequence[Any]], bool] = _raised,
    ) -> None:
        self.shared = shared
        self.changed = changed
        self.failed = failed

    def overlapping(self) -> None:
        """Raises LanesDiffer."""
        raise LanesDiffer(self.shared)

    def refused(self, error: CaptureError) -> None:
        """Raises LanesDiffer: eager would step the models, or skip nothing."""
        raise LanesDiffer(str(error)) from error

    def eager(self) -> Callable[..., Any]:
        """Never called."""
        raise AssertionError("eager cannot replace a part of what was called")
