"""Measure the seconds of each pass of a compilation, which sum to the whole."""

from __future__ import annotations

import time


class Clock:
    """Seconds of each pass since the clock was made, in order of their ends."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """End the pass `name`, which began at the last lap."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def resume(self) -> None:
        """Exclude the time since the last lap."""
        self._last = time.perf_counter()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())
