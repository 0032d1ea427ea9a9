"""A signal handler calls a tail that is under way: both calls are done, or one is."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import pytest

from fuseopt.replicate import driver, steady
from fuseopt.tails import led, single, single_graph, tail, totals
from tests.replicate.at_lines import call_at_each_line, sent
from tests.tails.pairs import pair_of

__all__ = ["sent"]  # a fixture


@pytest.mark.family(3)
@pytest.mark.parametrize("clips", [True, False], ids=["clip", "no clip"])
@pytest.mark.parametrize(
    "leads",
    [led, single_graph, single, tail, totals, steady, driver],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_a_handler_that_calls_the_tail(
    sent: list[Any], leads: ModuleType, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any line of a file, and of those that end a step."""
    make = functools.partial(pair_of, "momentum", clips, fallback="error")
    lines = call_at_each_line(sent, leads, monkeypatch, make)
    assert lines > (25 if leads is single else 40)
