"""A signal handler calls a tail that is under way: both calls are done, or one is."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.errors import LaunchError
from fuseopt.replicate import driver, steady
from fuseopt.tails import led, single_graph, tail, totals
from tests.frozen import unlike
from tests.replicate.at_lines import at_each_line, held
from tests.replicate.steady_twins import OPTIONS, WAYS, Pair, Side

NORM = 0.1


@pytest.fixture
def sent() -> Iterator[list[Any]]:
    """What the handler of a signal calls, last first."""
    calls: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls[-1]())
    yield calls
    signal.signal(signal.SIGUSR1, before)


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
    [led, single_graph, tail, totals, steady, driver],
    ids=lambda module: module.__name__.rpartition(".")[2],
)
def test_a_handler_that_calls_the_tail(
    sent: list[Any], leads: ModuleType, clips: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any line of a file, and of those that end a step."""
    if leads is driver:
        monkeypatch.setattr(steady.SteadyCalls, "repeat", lambda *_: False)

    def check(pair: Pair, error: Any, where: int) -> None:
        sent.pop()
        assert error is None or type(error) is LaunchError, (where, error)
        for _ in range(1 if error else 2):
            pair.twin.call()
        assert not [*unlike(held(pair.mine), held(pair.twin))], where

    def calls(pair: Pair) -> None:
        sent.append(pair.mine.call)

    assert at_each_line(calls, check, leads, lambda: make(clips)) > 40
