"""Entries that stand in the states of an optimizer while a step runs."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import is_
from typing import Any

from ..runtime.undo import at_once

State = dict[str, Any]


def holds(state: Mapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> bool:
    """Has an optimizer's state these very keys and values? Without keys, compares only
    values.
    """
    return (
        len(state) == len(values)
        and all(map(is_, state.values(), values))
        and all(map(is_, state, keys))
    )


class Beside:
    """Entries beside those of some states: `added[i]` in `states[i]`."""

    def __init__(
        self, states: Sequence[State] = (), added: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.states, self._added = states, added
        self._only_dicts = {*map(type, states)} <= {dict}
        by_key: dict[str, list[State]] = {}
        for state, entries in zip(states, added, strict=True):
            for key in entries:
                by_key.setdefault(key, []).append(state)
        #: (key, the states that get it)
        self.keys = [*by_key.items()]

    @contextlib.contextmanager
    def within(self) -> Iterator[None]:
        """Add the entries within the context."""
        try:
            if self._only_dicts:
                collections.deque(map(dict.update, self.states, self._added), 0)
            else:
                at_once([*map(update, self.states, self._added)])
            yield
        finally:
            try:
                self._drop()
            finally:
                self._drop()  # an interrupt may come before the first one is added

    def _drop(self) -> None:
        """Remove the entries, in one C call."""
        if self._only_dicts:
            pops = [map(dict.pop, x, repeat(key), repeat(None)) for key, x in self.keys]
            at_once([functools.partial(collections.deque, pop, 0) for pop in pops])
        else:
            pairs = [(type(x).pop, x, key) for key, xs in self.keys for x in xs]
            at_once([functools.partial(pop, x, key, None) for pop, x, key in pairs])


def update(state: State, new: Mapping[str, Any]) -> Callable[[], object]:
    """Return the C call that adds entries to a state."""
    return functools.partial(type(state).update, state, new)
