"""A signal handler calls a tail that is under way: both calls are done, or one is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.replicate import driver, steady
from fuseopt.tails import led, single, single_graph, tail, totals
from tests.replicate.at_lines import call_at_each_line, sent
from tests.replicate.steady_twins import OPTIONS, WAYS, Pair, Side

__all__ = ["sent"]  # a fixture

NORM = 0.1


def make(clips: bool) -> Pair:
    """Return a tail and its twin."""
    given = {"clip_grad_norm": NORM} if clips else {"zero_grad": False}

    def by_tail(side: Side) -> None:
        compiled = fuseopt.tail(side.opt, fallback="error", **given, **OPTIONS)
        side.call = lambda: compiled()

    WAYS["tail"] = by_tail
    try:
        pair = Pair("momentum", "tail")
    finally:
        del WAYS["tail"]
    twin = pair.twin

    def eager() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(twin.ps, NORM, foreach=True)
        twin.opt.step()

    twin.call = eager
    return pair


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
    lines = call_at_each_line(sent, leads, monkeypatch, lambda: make(clips))
    assert lines > (25 if leads is single else 40)
