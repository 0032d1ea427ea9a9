"""The ChangePolicy of led steps: trace the whole step, or survey the lanes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CaptureError, FuseoptError
from ..inputs.keys import Unlike
from ..runtime.binding import Binding
from ..runtime.guards.tensors import CHANGED


class Stale(FuseoptError):
    """Lanes differ from the last survey; nothing was written yet."""


class WholeInstead:
    """Leaves calls that a led step does not fit to the whole step; see ChangePolicy.

    `tell(error, args)` raises Unlike for an error of fuseopt's own.
    """

    def __init__(self, tell: Callable[[Exception, Sequence[Any]], None]) -> None:
        self.tell = tell

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """The lanes are surveyed again: raises Stale."""
        # without a guard, the last call was interrupted: that is no change
        if (found & CHANGED and bound.guard is not None) or metadata != bound.metadata:
            raise Stale

    def overlapping(self) -> None:
        """Lanes that share memory are not alike: raises Unlike."""
        raise Unlike("lanes share memory")

    def refused(self, error: CaptureError) -> None:
        """Eager would run the models alone: raises Unlike."""
        raise Unlike(str(error)) from error

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """Raises Unlike for an error of fuseopt's own; False for others."""
        self.tell(error, args)
        return False

    def eager(self) -> Callable[..., Any]:
        """Never called."""
        raise AssertionError("eager would step only the leading lanes")
