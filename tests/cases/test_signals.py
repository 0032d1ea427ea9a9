"""An exception at any place within a tail of products, and within a first step."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fuseopt.handlers import Interrupted
from fuseopt.runtime.step import CompiledStep
from fuseopt.uniformity import prove
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


class TimeIsUp(Exception):
    """What the handler of a signal raises, an Exception as a TimeoutError is."""


@pytest.fixture
def handler() -> Iterator[None]:
    def handle(*_: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield
    finally:
        assert signal.getsignal(signal.SIGUSR1) is handle
        signal.signal(signal.SIGUSR1, before)


class SignalAtFunction(AtFunction):
    """A signal comes where function number `place` begins, be it Dynamo's or ours."""

    homes = ("/fuseopt/", "/torch/_dynamo/")

    def _see(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if event == "call" and any(home in name for home in self.homes):
            self.count += 1
            if self.count == self.place:
                self.where = frame.f_code.co_qualname
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
        return None


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize(
    ("kind", "lanes", "shares"),
    [
        ("elementwise", 2, 5),
        ("elementwise", 18, 5),
        ("tail of AdamW", 2, 3),
        pytest.param("elementwise", 2, 60, marks=pytest.mark.slow),
        pytest.param("elementwise", 18, 60, marks=pytest.mark.slow),
        pytest.param("products", 2, 40, marks=pytest.mark.slow),
        pytest.param("tail of AdamW", 18, 40, marks=pytest.mark.slow),
    ],
)
def test_what_a_handler_raises_in_a_trace_arrives(
    kind: str, lanes: int, shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Exception too, which whoever traces takes for an error of the trace.

    Python itself drops what a handler raises while a generator is closed.
    """
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda x: dropped.append(x.exc_type))

    def first(place: int) -> tuple[SignalAtFunction, bool, list[Any], list[Any]]:
        torch._dynamo.reset()
        twin = Twin(kind, WAYS[0], lanes)
        twin.set_grads()
        before, raised = twin.held(), False
        with SignalAtFunction(place) as at:
            try:
                twin.step()
            except TimeIsUp:
                torch.set_grad_enabled(True)  # torch's `_use_grad` may leave it off
                raised = True
        return at, raised, before, twin.held()

    first(0)  # kernels are built once
    at, raised, _, after = first(0)
    total = at.count
    assert not raised
    for share in range(shares):
        at, raised, before, held = first(1 + total * (2 * share + 1) // (2 * shares))
        assert raised or {TimeIsUp, Interrupted}.intersection(dropped), at.where
        dropped.clear()
        assert alike(held, before) or alike(held, after), at.where


@pytest.mark.usefixtures("handler")
def test_what_a_handler_raises_in_a_proof_arrives() -> None:
    """Whoever asks for the proof."""
    twin = Twin("elementwise", "", 2)
    function = type(twin.opt).step
    with SignalAtFunction(60) as at, pytest.raises(TimeIsUp):
        prove(function, twin.opt)
    assert at.where
