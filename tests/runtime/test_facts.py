"""Facts are compared alike in Python and in C."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from fuseopt.compat.facts import (
    Fact,
    attributes,
    empty,
    entry,
    first_untrue,
    items,
    not_none,
    result,
)
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.guards.facts import in_c
from fuseopt.runtime.guards.library import HELPER


@pytest.fixture(scope="module")
def helper() -> ctypes.PyDLL:
    return ctypes.PyDLL(Builder().load(HELPER, None, False)._name)


class Holder:
    """What the facts are about."""

    def __init__(self) -> None:
        self.x: Any = object()
        self.table: dict[str, Any] = {"a": 1.5, "none": None}
        self.row: list[Any] = [object(), object()]
        self.hooks: dict[int, Any] = {}

    def facts(self) -> list[Fact]:
        return [
            *attributes(self, "x", "missing"),
            entry(self.table, "a"),
            *items(self.row),
            empty(self.hooks),
            not_none(self.table, "a"),
            result(2, len, self.row),
        ]


CHANGES: dict[str, Callable[[Holder], Any]] = {
    "another object": lambda h: setattr(h, "x", object()),
    "an equal number": lambda h: h.table.update(a=float("1.5")),
    "None": lambda h: h.table.update(a=None),
    "an entry less": lambda h: h.table.pop("a"),
    "an attribute more": lambda h: setattr(h, "missing", 1),
    "an item": lambda h: h.row.__setitem__(1, object()),
    "an item less": lambda h: h.row.pop(),
    "an item more": lambda h: h.row.append(1),
    "a hook": lambda h: h.hooks.update({1: 1}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_change_is_found(helper: ctypes.PyDLL, change: str) -> None:
    holder = Holder()
    facts = holder.facts()
    compiled = in_c(helper, facts)
    assert first_untrue(facts) == compiled() == 0
    CHANGES[change](holder)
    assert first_untrue(facts) == compiled() > 0


def test_an_error_is_raised(helper: ctypes.PyDLL) -> None:
    """So what a signal handler raises in a function is not lost."""

    def fails() -> Any:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        in_c(helper, [result(None, fails)])()
