"""When a step that Dynamo has traced as often as it does is traced anew."""

from __future__ import annotations

from ..compiler.diagnostics import AFTER


class Retries:
    """Counts the calls since the limit was reached, or since the last trace."""

    def __init__(self) -> None:
        self.made = 0
        self._calls = 0
        self._reports = 0

    def due(self, reports: int) -> bool:
        """Is a call one in which the step is to be traced anew?

        `reports`: how many graphs were compiled so far. Each of them begins the count
        anew.
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
