"""A dict of the entries that were used last."""

from __future__ import annotations

from typing import Any, TypeVar

V = TypeVar("V")


class Recent(dict[Any, V]):
    """At most `most` entries, the one used last at the end."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def use(self, key: Any, value: V) -> list[V]:
        """Move an entry to the end, or add it; return the values that this removes."""
        self.pop(key, None)
        self[key] = value
        return [self.pop(next(iter(self))) for _ in range(len(self) - self.most)]
