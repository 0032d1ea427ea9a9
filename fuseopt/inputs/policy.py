"""The ChangePolicy of partial steps: eager cannot replace a part of a user's call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CaptureError, FuseoptError
from ..runtime.binding import Binding
from ..runtime.guards.tensors import CHANGED
from .keys import LanesDiffer


class LanesChanged(FuseoptError):
    """Lanes differ from the last survey; the step has written nothing yet."""


def follow(bound: Binding, metadata: list[Any], found: int) -> None:
    """Accept all changes."""


def survey_again(bound: Binding, metadata: list[Any], found: int) -> None:
    """Raise LanesChanged if a tensor has a new layout: lanes may differ now."""
    # without a guard, the last call was interrupted, which is no change
    if (found & CHANGED and bound.guard is not None) or metadata != bound.metadata:
        raise LanesChanged


def _unhandled(error: Exception, args: Sequence[Any]) -> bool:
    """Leave errors as they are."""
    return False


class RefusingPolicy:
    """Refuses calls that do not fit: raises LanesDiffer before any write.

    `shared`: the reason for tensors that share memory in a new way. `changed`: called
    when a dtype, a shape or a stride is new. `failed`: called with an error within
    fuseopt and the arguments of the call. See ChangePolicy.
    """

    def __init__(
        self,
        shared: str,
        changed: Callable[[Binding, list[Any], int], None] = follow,
        failed: Callable[[Exception, Sequence[Any]], bool] = _unhandled,
    ) -> None:
        self.shared = shared
        self.changed = changed
        self.failed = failed

    def overlapping(self) -> None:
        """Raise LanesDiffer."""
        raise LanesDiffer(self.shared)

    def refused(self, error: CaptureError) -> None:
        """Raise LanesDiffer: eager would step the models, or skip nothing."""
        raise LanesDiffer(str(error)) from error

    def eager(self) -> Callable[..., Any]:
        """Raise AssertionError; no caller reaches this."""
        raise AssertionError("eager cannot replace a part of what was called")
