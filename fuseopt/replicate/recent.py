"""Find the lanes of a call among those of an optimizer's last calls."""

from __future__ import annotations

import ctypes
from typing import Any

from ..runtime.guards.given import Given
from ..runtime.guards.library import Held
from ..shadow.lanes import Found, Lanes


class Recent:
    """The lanes of the last calls, the latest last."""

    def __init__(self) -> None:
        self.every: list[Lanes] = []

    def clear(self) -> None:
        """Forget all lanes."""
        self.every.clear()

    def forget(self) -> None:
        """Let the next look compare everything in Python."""
        for lanes in self.every:
            lanes.forget()

    def take(self, lanes: Lanes, most: int, some: bool) -> None:
        """Add lanes, and keep `most` in all (at least 2): only those with the same
        parameters and states, or, with `some`, the same states of common parameters.
        """
        compatible = [x for x in self.every if x.holds_as(lanes, some)]
        self.every = [*compatible[1 - most :], lanes]

    def look(
        self,
        optimizer: Any,
        rest: Held,
        helper: ctypes.PyDLL | None,
        given: Given | None,
    ) -> tuple[Lanes, Found] | None:
        """The lanes among these that the optimizer still has, and their tensors; None
        if there are none. The arguments are those of Lanes.look.
        """
        for lanes in reversed(self.every):
            tensors = lanes.look(optimizer, rest, helper, given)
            if tensors is not None:
                if lanes.replaced:
                    # the other lanes keep objects alive that were replaced
                    lanes.replaced = False
                    self.every = [lanes]
                elif lanes is not self.every[-1]:
                    self.every.remove(lanes)
                    self.every.append(lanes)
                return lanes, tensors
        return None
