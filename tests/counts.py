"""What a test traces and builds."""

from __future__ import annotations

from typing import Any


class Counts:
    """What was traced and built since this was made. `traces`: the times that Dynamo
    began to trace; `texts`: the different ones that a compiler was given.
    """

    def __init__(self) -> None:
        self.traces = 0
        self.texts: set[str] = set()

    def began(self, *_: Any) -> None:
        self.traces += 1
