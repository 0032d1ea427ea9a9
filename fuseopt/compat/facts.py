"""Facts that a call depends on, as data that Python or the compiled helper compares.

A fact is about one object: an entry of a dict, an item or a length, or the result of a
function. Objects are compared by identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

#: Kinds of facts, as in `runtime/guards/facts.h`.
ENTRY, OTHER, ITEM, LENGTH, RESULT = range(5)
#: The value of an entry that a dict lacks.
ABSENT = object()


class Fact(NamedTuple):
    """One fact: `kind`, the object, a key, an index or arguments, and the value."""

    kind: int
    of: Any
    key: Any
    value: Any

    def holds(self) -> bool:
        """Compare in Python, as the helper does."""
        kind, of, key, value = self
        if kind == RESULT:
            return of(*key) is value
        if kind == LENGTH:
            return bool(len(of) == key)
        if kind == ITEM:
            return bool(key < len(of) and of[key] is value)
        return (of.get(key, ABSENT) is value) == (kind == ENTRY)


def entry(table: dict[str, Any], key: str) -> Fact:
    """Return the fact that a dict keeps its present entry, or lacks it."""
    return Fact(ENTRY, table, key, table.get(key, ABSENT))


def not_none(table: dict[str, Any], key: str) -> Fact:
    """Return the fact that a dict has a key, whose value is not None."""
    return Fact(OTHER, table, key, None)


def attributes(x: object, *names: str) -> list[Fact]:
    """Return the facts that an object keeps its present attributes of these names."""
    return [entry(vars(x), name) for name in names]


def items(values: list[Any]) -> list[Fact]:
    """Return the facts that a list keeps its present items."""
    every = [Fact(ITEM, values, i, x) for i, x in enumerate(values)]
    return [Fact(LENGTH, values, len(values), None), *every]


def empty(container: Any) -> Fact:
    """Return the fact that a dict or a list is empty."""
    return Fact(LENGTH, container, 0, None)


def result(value: Any, function: Callable[..., Any], *args: Any) -> Fact:
    """Return the fact that a call of a function returns this very object."""
    return Fact(RESULT, function, args, value)


def first_untrue(facts: Sequence[Fact]) -> int:
    """Return 0 if all facts hold, else the number of the first other one, from 1 on."""
    return next((n for n, fact in enumerate(facts, 1) if not fact.holds()), 0)
