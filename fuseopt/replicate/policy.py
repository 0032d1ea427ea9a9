"""What becomes of a call that a led step was not made for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import CaptureError, FuseoptError
from ..runtime.binding import Binding
from ..runtime.guards.tensors import CHANGED
from ..shadow.lanes import Unlike


class Stale(FuseoptError):
    """Lanes are other than they were surveyed to be; nothing was written yet."""


class WholeInstead:
    """Whatever a led step was not made for, the whole step is; see ChangePolicy.

    `tell(error, args)` raises Unlike for an error of fuseopt's own.
    """

    def __init__(self, tell: Callable[[Exception, Sequence[Any]], None]) -> None:
        self.tell = tell

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """The lanes are surveyed anew."""
        # without a guard nothing is known of the last call, which was cut off
        if (found & CHANGED and bound.guard is not None) or metadata != bound.metadata:
            raise Stale

    def overlapping(self) -> None:
        """A lane that shares memory with another is not alike."""
        raise Unlike("lanes share memory")

    def refused(self, error: CaptureError) -> None:
        """Eager would run the leading lanes alone."""
        raise Unlike(str(error)) from error

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """The same."""
        self.tell(error, args)
        return False

    def eager(self) -> Callable[..., Any]:
        """Never asked for."""
        raise AssertionError("eager would run the leading lanes alone")
