"""Attempts that become rarer, since the next calls may make them needless."""

from __future__ import annotations

#: Most calls from one attempt to the next.
LONGEST = 64


class Attempts:
    """Attempts that become rarer: the first, second, fourth, eighth call may make one,
    at last each `LONGEST`th.
    """

    def __init__(self) -> None:
        self._calls, self._next = 0, 1

    def due(self) -> bool:
        """Count a call; return whether it may make an attempt."""
        self._calls += 1
        if self._calls < self._next:
            return False
        self._next += min(self._calls, LONGEST)
        return True
