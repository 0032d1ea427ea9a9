"""An exception at any place within a tail of products, and within a first step."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from fuseopt.runtime.step import CompiledStep
from tests.caller_states import WAYS, Twin, alike, held
from tests.runtime.test_undo import AtFunction, Injected, at_each_place

pytestmark = [
    pytest.mark.mishaps,
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize(
    ("lanes", "every"),
    [(2, 10), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_a_tail_of_products(lanes: int, every: int) -> None:
    """Between the launch, which ATen is a part of, and the writes to the state."""
    assert at_each_place("tail", WAYS[0], lanes, AtFunction, every) > 100


@pytest.mark.slow
def test_a_led_tail_of_products() -> None:
    assert at_each_place("tail", WAYS[0], 18, AtFunction, 4) > 100


class AfterLaunch(AtFunction):
    """Raises at function number `place` after the first launch has begun."""

    def __enter__(self) -> AfterLaunch:
        launch, see = CompiledStep._launch, self._see
        self.launch = launch

        def launching(*args: Any, **kwargs: Any) -> Any:
            if sys.gettrace() is None and self.count == 0:
                sys.settrace(see)
            return launch(*args, **kwargs)

        CompiledStep._launch = launching  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        CompiledStep._launch = self.launch  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [2, 18])
def test_a_first_step_that_creates_state(lanes: int) -> None:
    """It leaves no state and parameters as they were, or both as after the step."""
    place = 1
    while True:
        fused, twin = (Twin("products", way, lanes) for way in (WAYS[0], ""))
        fused.set_grads()
        twin.set_grads()
        before = held(fused.opt)
        with AfterLaunch(place) as injected:
            try:
                fused.step()
                raised = False
            except Injected:
                raised = True
        assert injected.count
        if injected.count < place:
            assert place > 3
            break
        twin.step()
        if raised and alike(held(fused.opt), before):
            fused.step()
        assert alike(held(fused.opt), held(twin.opt)), injected.where
        place += 16
