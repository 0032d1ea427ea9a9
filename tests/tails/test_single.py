"""Tails that one call of C repeats, and what changes between two of them."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import fuseopt
from fuseopt.tails.single import SingleTail
from tests.beside import quiet
from tests.replicate.steady_table import EVENTS
from tests.replicate.steady_twins import OPTIONS, WAYS, Pair, Side

NORM = 0.1
#: A tail reads a list of parameters more than once, which ends an iterator.
TAIL_EVENTS = [name for name in EVENTS if name != "parameters in an iterator"]


def params_of(side: Side) -> list[Any]:
    return [p for group in side.opt.param_groups for p in group["params"]]


def pair_of(name: str, clips: bool = True) -> Pair:
    """Return a tail and its twin in eager."""
    given: dict[str, Any] = {"clip_grad_norm": NORM} if clips else {"zero_grad": False}

    def by_tail(side: Side) -> None:
        tail = fuseopt.tail(side.opt, **given, **OPTIONS)
        side.call = lambda: tail()

    with mock.patch.dict(WAYS, tail=by_tail):
        pair = Pair(name, "tail")
    twin = pair.twin

    def eager() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(params_of(twin), NORM, foreach=True)
        twin.opt.step()

    twin.call = eager
    return pair


class Count:
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

        self._patches = [
            mock.patch.object(SingleTail, "_launched", counted_launch),
            mock.patch.object(SingleTail, "__call__", counted_call),
        ]

    def __enter__(self) -> Count:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()


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
            if pair.step(EVENTS[event]):
                for _ in range(3):
                    if not pair.step():
                        break
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
