"""What is dropped with an optimizer, wherever its end finds the program."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from fuseopt import compat


class Local:
    """An object that only a local variable holds."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_forgetting_keeps_no_frame_alive(uncollected: None) -> None:
    """An optimizer may end in the middle of another one's step, which has gradients."""

    def step() -> weakref.ref[Local]:
        held = Local()
        compat.forget([], lambda gm, inputs: gm)
        return weakref.ref(held)

    assert step()() is None
