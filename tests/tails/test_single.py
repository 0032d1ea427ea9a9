"""Tails that one call of C repeats, and what changes between two of them."""

from __future__ import annotations

from typing import Any

import pytest

from fuseopt.tails.single import SingleTail
from tests.beside import quiet
from tests.replicate.steady_table import EVENTS
from tests.replicate.steady_twins import Counted
from tests.tails.pairs import pair_of

#: A tail reads a list of parameters more than once, which ends an iterator.
TAIL_EVENTS = [name for name in EVENTS if name != "parameters in an iterator"]


class Count(Counted):
    """Counts the tails that one call of C did, and those that it compared."""

    def __init__(self) -> None:
        self.launched = self.compared = 0
        launched, call = SingleTail._launched, SingleTail.__call__

        def counted_launch(*args: Any) -> bool:
            did = launched(*args)
            self.launched += did
            return did

        def counted_call(*args: Any) -> Any:
            results = call(*args)
            self.compared += results is not None
            return results

        super().__init__(
            (SingleTail, "_launched", counted_launch),
            (SingleTail, "__call__", counted_call),
        )


def changed(name: str, event: str, launches: bool) -> None:
    """Compare both sides after an event, and after three more calls."""
    with quiet(), Count() as count:
        pair = pair_of(name)
        try:
            for _ in range(10):
                before = count.launched, count.compared
                pair.step()
            assert count.compared == before[1] + 1, "C did not compare the last call"
            assert count.launched == before[0] + launches
            pair.outlive(EVENTS[event])
        finally:
            pair.end()


@pytest.mark.family(60)
@pytest.mark.parametrize("event", TAIL_EVENTS)
@pytest.mark.parametrize("name", ["momentum", "adamw", "tensor_rate"])
def test_an_event(name: str, event: str) -> None:
    changed(name, event, True)


@pytest.mark.family(60)
@pytest.mark.parametrize("event", TAIL_EVENTS)
@pytest.mark.parametrize("name", ["Own", "momentum"])
def test_an_event_where_python_launches(
    name: str, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: C compares what is around the step."""
    monkeypatch.setattr(SingleTail, "_learn", lambda _: None)
    changed(name, event, False)
