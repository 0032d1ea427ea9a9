"""What a caller has set around a step is part of what the step is compiled for."""

from __future__ import annotations

import contextlib

import pytest
import torch

import fuseopt
from tests import caller_states
from tests.caller_states import (
    KINDS,
    SCRIPTS,
    STATES,
    WAYS,
    WHEN,
    Twin,
    alike,
    held,
)


def compare(kind: str, state: str, when: str, way: str, lanes: int) -> None:
    """Two steps in each context: autocast keeps casts from the first to the second."""
    eager, fused = Twin(kind, "", lanes), Twin(kind, way, lanes)
    for t in range(4):
        on = WHEN[when](t)
        errors = []
        for twin in (eager, fused):
            before = held(twin.opt)
            error = ""
            with STATES[state]() if on else contextlib.nullcontext():
                try:
                    for _ in range(2):
                        twin.set_grads()
                        before = held(twin.opt)
                        twin.step()
                except RuntimeError as raised:
                    error = type(raised).__name__
            errors.append(error)
        assert errors[0] == errors[1], f"step {t}"
        if errors[0]:  # eager has done a part
            assert alike(held(fused.opt), before)
            return
        assert alike(held(fused.opt), held(eager.opt)), f"step {t}"


#: A tail is compiled in one way.
KINDS_AND_WAYS = [
    (kind, way)
    for kind in KINDS
    for way in (WAYS[:1] if kind.startswith("tail") else WAYS)
]


@pytest.mark.family(600)
@pytest.mark.parametrize("lanes", [4, 18])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("kind", "way"), KINDS_AND_WAYS)
@pytest.mark.filterwarnings("ignore")
def test_states_around_a_step(
    kind: str, state: str, when: str, way: str, lanes: int
) -> None:
    compare(kind, state, when, way, lanes)


@pytest.mark.parametrize(("when", "way"), [("later", WAYS[0]), ("off later", WAYS[1])])
def test_products_in_autocast(when: str, way: str) -> None:
    compare("products", "bfloat16", when, way, 4)
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.family(48)
@pytest.mark.parametrize("lanes", [4, 6, 18, 34])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts(script: str, when: str, way: str, lanes: int) -> None:
    compare(script, "bfloat16", when, way, lanes)
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.parametrize(
    "lanes", [4, pytest.param(18, marks=pytest.mark.slow)], ids=str
)
def test_autocast_of_the_step_itself(lanes: int) -> None:
    compare("own", "no grad", "later", WAYS[0], lanes)
    assert not any(r.fallback for r in fuseopt.reports())


@pytest.mark.filterwarnings("ignore:fuseopt")
def test_casts_that_a_context_of_the_step_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KINDS, "own", caller_states.OwnOfParameters)
    compare("own", "no grad", "later", WAYS[0], 4)
    assert "autocast may keep the cast" in fuseopt.reports()[-1].fallback


@pytest.mark.slow
def test_an_error_within_the_step_s_context_leaves_it() -> None:
    """What a capture enters, it leaves."""
    fused = Twin("own", WAYS[0], 2)
    before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    fused.set_grads()
    fused.params[0].grad = torch.randn(8, 8).to_sparse()
    with contextlib.suppress(Exception):
        fused.step()
    assert (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")) == before
    assert torch.autocast_increment_nesting() == 1
    torch.autocast_decrement_nesting()
