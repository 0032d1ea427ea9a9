"""Find the lanes of a call among those of an optimizer's last calls."""

from __future__ import annotations

import ctypes
from typing import Any

from ..runtime.guards.given import Given
from ..runtime.guards.library import Held
from ..shadow.lanes import Lanes
from ..shadow.look import Found, Look


class Recent:
    """The lanes of the last calls, the latest last."""

    def __init__(self) -> None:
        self.every: list[Look] = []

    def clear(self) -> None:
        """Forget all lanes."""
        self.every.clear()

    def forget(self) -> None:
        """Let the next look compare everything in Python."""
        for look in self.every:
            look.forget()

    def take(self, lanes: Lanes, most: int, some: bool, young: bool) -> None:
        """Add lanes, and keep `most` in all (at least 2): only those with the same
        parameters and states, or, with `some`, the same states of common parameters.
        `young`: see Look.
        """
        compatible = [x for x in self.every if x.lanes.holds_as(lanes, some)]
        self.every = [*compatible[1 - most :], Look(lanes, young=young)]

    def live_in(self, home: Lanes) -> None:
        """Find lanes by their home from the next call on."""
        self.every = [x for x in self.every if x.lanes is not home]
        self.every.append(Look(home, may_lack=True))

    def look(
        self,
        optimizer: Any,
        rest: Held,
        helper: ctypes.PyDLL | None,
        given: Given | None,
    ) -> tuple[Lanes, Found] | None:
        """The lanes among these that the optimizer still has, and their tensors; None
        if there are none. The arguments are those of Look.look.
        """
        for look in reversed(self.every):
            found = look.look(optimizer, rest, helper, given)
            if found is not None:
                if look.replaced or look.may_lack:
                    # the other lanes keep objects alive that were replaced, or are
                    # found in this home too
                    look.replaced = False
                    self.every = [look]
                elif look is not self.every[-1]:
                    self.every.remove(look)
                    self.every.append(look)
                return look.lanes_of(found.present), found
        return None
