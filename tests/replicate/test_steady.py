"""Calls that repeat the last one, and what changes between two of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from fuseopt.errors import LaunchError
from fuseopt.replicate import comparison, driver, single_call, steady
from tests.beside import quiet
from tests.frozen import unlike
from tests.replicate.at_lines import (
    FORMS,
    at_each_line,
    call_at_each_line,
    held,
    restrict,
    sent,
)
from tests.replicate.steady_table import EVENTS
from tests.replicate.steady_twins import WAYS, Count, Pair

__all__ = ["sent"]  # a fixture

#: What a user may put in place of a list of parameters.
LISTS = [name for name in EVENTS if "arameters in" in name or "list of" in name]


def changed(name: str, way: str, event: str) -> None:
    """Compare both sides after an event, and after three more calls."""
    with quiet(), Count() as count:
        pair = Pair(name, way)
        try:
            pair.warm(count)
            pair.outlive(EVENTS[event])
        finally:
            pair.end()


@pytest.mark.family(250)
@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["Own", "Noting", "adamw", "momentum", "tensor_rate"])
def test_an_event(name: str, way: str, event: str) -> None:
    changed(name, way, event)


@pytest.mark.parametrize("event", LISTS)
def test_parameters_that_are_no_list(event: str) -> None:
    changed("Noting", "compile", event)


NAMES = [module.__name__.rpartition(".")[2] for module in FORMS]
#: Lines at which a signal interrupts a call, at least.
LINES = {driver: 70, steady: 70, comparison: 40, single_call: 10}


class Stop(Exception):
    """What the handler of a signal raises."""


@pytest.mark.slow
@pytest.mark.parametrize("leads", FORMS[1:], ids=NAMES[1:])
def test_a_handler_that_raises(
    sent: list[Any], leads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call was done, or has changed nothing."""
    restrict(leads, monkeypatch)
    befores: list[Any] = []

    def stop() -> None:
        raise Stop

    def check(pair: Pair, error: Any, where: int) -> None:
        assert type(error) is Stop, where
        if held(pair.mine) == befores.pop():
            pair.mine.call()
        pair.twin.call()
        assert not [*unlike(held(pair.mine), held(pair.twin))], where

    sent.append(stop)
    steps = at_each_line(lambda pair: befores.append(held(pair.mine)), check, leads)
    assert steps > LINES[leads]


@pytest.mark.parametrize(
    "leads",
    [
        pytest.param(x, marks=() if x is single_call else pytest.mark.slow)
        for x in FORMS
    ],
    ids=NAMES,
)
def test_a_handler_that_steps_the_optimizer(
    sent: list[Any], leads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is done. The interrupted one too, or it has changed nothing."""
    assert call_at_each_line(sent, leads, monkeypatch) > LINES[leads]


@pytest.mark.slow
def test_a_handler_that_steps_between_two_calls_of_c(
    sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: one call compares what is around the step, and one its lanes."""
    monkeypatch.setattr(single_call, "_in_c", lambda _: False)
    assert call_at_each_line(sent, single_call, monkeypatch) > LINES[comparison]


@pytest.mark.slow
@pytest.mark.parametrize("leads", FORMS[1:], ids=NAMES[1:])
def test_a_handler_that_steps_with_other_gradients(
    sent: list[Any], leads: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later calls read the gradients that the optimizer then has."""
    restrict(leads, monkeypatch)

    def steps(pair: Pair) -> None:
        mine = pair.mine

        def other() -> None:
            for p in mine.ps:
                p.grad = torch.zeros_like(p)
            mine.call()
            for p in mine.ps:
                p.grad = None

        sent.append(other)

    def check(pair: Pair, error: Any, where: int) -> None:
        sent.pop()
        assert error is None or type(error) is LaunchError, (where, error)
        # what either step wrote depends on their order: go on alike from here
        with torch.no_grad():
            for p, q in zip(pair.mine.ps, pair.twin.ps, strict=True):
                q.copy_(p)
                buffers = [s.opt.state[x] for s, x in ((pair.mine, p), (pair.twin, q))]
                buffers[1]["momentum_buffer"].copy_(buffers[0]["momentum_buffer"])

    assert at_each_line(steps, check, leads) > LINES[leads]
