"""Lists that a user gave to a tail, and may change between its calls."""

from __future__ import annotations

from itertools import chain
from operator import is_

from ..compat.facts import Fact, items
from .averages import Averages
from .order import ClipOrder


class Lists:
    """Lists of averages, their sources and copies, and the list of a clip's order."""

    def __init__(self, beside: Averages, order: ClipOrder) -> None:
        self._owners = beside, order
        self._lists = [*beside.lists, *order.lists]
        self._note()

    def _note(self) -> None:
        self._sizes = [*map(len, self._lists)]
        self._entries = [*chain.from_iterable(self._lists)]

    def facts(self) -> list[Fact]:
        """Return the facts of which it follows that no entry has changed."""
        return [fact for each in self._lists for fact in items(each)]

    def follow(self) -> bool:
        """Were entries added, removed or replaced since the last call? Then the holders
        of copies must copy them again. Raises TypeError, ValueError.
        """
        if not self._lists:
            return False
        now, sizes = chain.from_iterable(self._lists), [*map(len, self._lists)]
        if sizes == self._sizes and all(map(is_, now, self._entries)):
            return False
        self._sizes = []  # after a refusal, the next call compares again
        beside, order = self._owners
        beside.follow()
        order.follow()
        self._note()
        return True
