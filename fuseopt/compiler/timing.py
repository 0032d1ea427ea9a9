"""In: names, as passes end. Out: the seconds of each pass, which sum to the whole."""

from __future__ import annotations

import time


class Clock:
    """Seconds of each pass since it was made, in the order in which they ended."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What ran since the last lap was the pass `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    def resume(self) -> None:
        """What ran since the last lap is no pass of this clock."""
        self._last = time.perf_counter()

    @property
    def total(self) -> float:
        return sum(self.seconds.values())
