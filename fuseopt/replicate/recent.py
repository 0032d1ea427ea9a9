"""The lanes of an optimizer's last calls: are those of this one among them?"""

from __future__ import annotations

import ctypes
from typing import Any

from ..runtime.guards.given import Given
from ..runtime.guards.library import Held
from ..shadow.lanes import Found, Lanes


class Recent:
    """The lanes of the last calls, those of the last one last."""

    def __init__(self) -> None:
        self.every: list[Lanes] = []

    def clear(self) -> None:
        """Know no lanes."""
        self.every.clear()

    def forget(self) -> None:
        """Let the next look ask all anew."""
        for lanes in self.every:
            lanes.forget()

    def take(self, lanes: Lanes, most: int, some: bool) -> None:
        """Put lanes to so many others at most, of which each holds what these hold, or
        of what both have the same, if that is to be `some`.
        """
        known = [x for x in self.every if x.holds_as(lanes, some)]
        self.every = [*known[1 - most :], lanes]

    def look(
        self,
        optimizer: Any,
        rest: Held,
        helper: ctypes.PyDLL | None,
        given: Given | None,
    ) -> tuple[Lanes, Found] | None:
        """Lanes as they were in one of the last calls, and their tensors; None: in
        none. What is asked for is as in Lanes.look.
        """
        for lanes in reversed(self.every):
            found = lanes.look(optimizer, rest, helper, given)
            if found is not None:
                if lanes.replaced:
                    # what the others know keeps alive what lanes had
                    lanes.replaced = False
                    self.every = [lanes]
                elif lanes is not self.every[-1]:
                    self.every.remove(lanes)
                    self.every.append(lanes)
                return lanes, found
        return None
