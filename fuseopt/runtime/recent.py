"""A dict of the entries that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

V = TypeVar("V")


class Recent(OrderedDict[Any, V]):
    """At most `most` entries, the one used last at the end.

    `release`: called with each value that `use` or `clear` removes.
    """

    def __init__(
        self, most: int, release: Callable[[V], object] = lambda _: None
    ) -> None:
        super().__init__()
        self._most, self._release = most, release

    def use(self, key: Any, value: V) -> V:
        """Move an entry to the end, or add it; return the value."""
        self[key] = value
        self.move_to_end(key)
        while len(self) > self._most:
            self._release(self.popitem(last=False)[1])
        return value

    def clear(self) -> None:
        """Remove all entries."""
        while self:
            self._release(self.popitem()[1])
