"""Signals at each line of a call."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from fuseopt.replicate import driver, steady
from fuseopt.runtime import commit
from tests.beside import quiet
from tests.replicate.steady_twins import Count, Pair, Side


class AtLine:
    """Raises a signal at line number `place` of two files in a call.

    `leads`: the module of the first file; the other one is of the end of a step.
    """

    def __init__(self, place: int, leads: ModuleType) -> None:
        self.place, self.count, self.where = place, 0, 0
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
    do: Any, check: Any, leads: ModuleType = steady, make: Callable[[], Pair] = led
) -> int:
    """Call `check` after a call with a signal at one line, for each line.

    Returns the number of lines. `do(pair)`: prepares a call.
    """
    place = 1
    with quiet(), Count() as count:
        pair = make()
        while True:
            for _ in range(5):
                before = count.done
                pair.step()
            assert count.done == before + (leads is not driver)
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
