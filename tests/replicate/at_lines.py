"""Signals at each line of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from fuseopt.errors import LaunchError
from fuseopt.isolate.quick import QuickSteps
from fuseopt.replicate import comparison, driver, single_call, steady
from fuseopt.runtime import commit
from fuseopt.tails import single as tails_single
from fuseopt.tails import single_graph, tail
from fuseopt.tails.single import SingleTail
from tests.beside import quiet
from tests.frozen import unlike
from tests.replicate.steady_twins import Count, Pair, Side

#: The forms of a call of a led step, from the longest to the shortest.
FORMS = driver, steady, comparison, single_call


class AtLine:
    """Raises a signal at line number `place` of some files in a call.

    `leads`: the module of the first file; the others are of what it calls.
    """

    def __init__(self, place: int, leads: ModuleType) -> None:
        self.place, self.count, self.where = place, 0, 0
        ends = steady.__file__, single_call.__file__, commit.__file__
        self.files = leads.__file__, *ends
        if leads is driver:
            self.files = leads.__file__, commit.__file__

    def __enter__(self) -> AtLine:
        sys.settrace(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _see(self, frame: Any, event: str, _: Any) -> Any:
        if event != "call":
            self.count += 1
            if self.count == self.place:
                self.where = frame.f_lineno
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return self._see if frame.f_code.co_filename in self.files else None


def held(side: Side) -> dict[str, Any]:
    """The bits of parameters and state."""
    every = side.frozen().items()
    return {k: x for k, x in every if k.startswith(("parameter", "state of"))}


def led() -> Pair:
    """Return a led step and its twin."""
    return Pair("momentum", "compile")


def at_each_line(
    do: Any,
    check: Any,
    leads: ModuleType,
    make: Callable[[], Pair] = led,
) -> int:
    """Call `check` after a call with a signal at one line, for each line.

    Returns the number of lines. `do(pair)`: prepares a call.
    """
    place = 1
    with quiet(), Count() as count:
        pair = make()
        while True:
            for _ in range(8):
                before, single = count.done, count.single
                pair.step()
            assert count.done == before + (leads is not driver)
            assert count.single == single + (leads in (single_call, tails_single))
            pair.both(Side.set_grads)
            do(pair)
            error: Any = None
            with AtLine(place, leads) as at:
                try:
                    pair.mine.call()
                except Exception as raised:
                    error = raised
            if at.count < place:
                pair.end()
                return place
            check(pair, error, at.where)
            place += 1


@pytest.fixture
def sent() -> Iterator[list[Any]]:
    """What the handler of a signal calls, last first."""
    calls: list[Any] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: calls[-1]())
    yield calls
    signal.signal(signal.SIGUSR1, before)


def restrict(leads: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let calls go no shorter way than that of `leads`.

    It is one of `FORMS`, or a module of a tail, which calls the step in any form.
    """
    if leads in (tail, single_graph):
        monkeypatch.setattr(tail, "single_tail", lambda *_: None)
    elif leads is not tails_single:
        monkeypatch.setattr(SingleTail, "_learn", lambda _: None)
    if leads in (driver, steady, comparison):
        monkeypatch.setattr(QuickSteps, "learn", lambda *_: None)
    if leads in (driver, steady):
        monkeypatch.setattr(steady, "comparison", lambda *_: None)
    if leads is driver:
        monkeypatch.setattr(steady.SteadyCalls, "repeat", lambda *_: False)


def call_at_each_line(
    sent: list[Any],
    leads: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[], Pair] = led,
) -> int:
    """Let a handler do the call that it interrupts, at each line; see `at_each_line`.

    Its call is done. The interrupted one too, or it has changed nothing.
    """
    restrict(leads, monkeypatch)

    def check(pair: Pair, error: Any, where: int) -> None:
        sent.pop()
        assert error is None or type(error) is LaunchError, (where, error)
        for _ in range(1 if error else 2):
            pair.twin.call()
        assert not [*unlike(held(pair.mine), held(pair.twin))], where

    def steps(pair: Pair) -> None:
        sent.append(pair.mine.call)

    return at_each_line(steps, check, leads, make)
