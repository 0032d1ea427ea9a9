"""Record whether the last call of a step ended, or an exception cut it off."""

from __future__ import annotations


class LastCall:
    """The end of the last call. A call compares nothing with one that was cut off.

    Records may be half updated then. `ended`: False while a call is under way, and
    after an exception that the step did not handle.
    """

    def __init__(self) -> None:
        self.ended = True

    def begin(self) -> bool:
        """Begin a call. Return False if the one before was cut off."""
        ended, self.ended = self.ended, False
        return ended
