"""Decide when to retrace a step that has hit Dynamo's recompile limit."""

from __future__ import annotations

from ..compiler.diagnostics import AFTER


class Retries:
    """Counts the calls since the step hit the limit, or since the last trace."""

    def __init__(self) -> None:
        self.made = 0
        self._calls = 0
        self._reports = 0

    def due(self, reports: int) -> bool:
        """Should this call trace the step anew?

        `reports`: the number of compiled graphs so far. A new graph restarts the count.
        """
        if self.made >= len(AFTER):
            return False
        self._calls += 1
        if reports != self._reports:
            self._reports, self._calls = reports, 0
        if self._calls < AFTER[self.made]:
            return False
        self.made, self._calls = self.made + 1, 0
        return True
