"""A tail that is cut off at any line has done nothing yet, or all of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fuseopt
from tests.shadow.test_untouched import BUILDS, CutOff, content, same
from tests.tails.twins import Side

SHAPES = [(3, 4), (5,)]


@pytest.fixture(autouse=True)
def gradients_are_recorded() -> Iterator[None]:
    yield
    sys.settrace(None)
    torch.set_grad_enabled(True)


def taken(side: Side) -> Any:
    """All that a tail may write."""
    states = [
        {k: content(v) for k, v in side.opt.state[p].items()} for p in side.params
    ]
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        for group in side.opt.param_groups
    ]
    tensors = [content(t) for p in side.params for t in (p, p.grad)]
    return tensors, [content(t) for t in side.ema], states, groups


def exhaust(build: Any, lanes: int, opcodes: bool, stride: int = 1) -> int:
    """Cut a steady tail off at every event, or at some; how many there are."""
    one, other = (Side(build, SHAPES * lanes) for _ in range(2))
    tail = fuseopt.tail(
        other.opt,
        clip_grad_norm=1.0,
        ema=[(other.ema, 0.9)],
        skip_nonfinite=True,
        fallback="error",
    )
    seed = k = 0

    def begin() -> Any:
        nonlocal seed
        seed += 1
        for side in (one, other):
            side.set_grads(seed)
        before = taken(other) if seed > 1 else None
        one.eager(1.0, 0.9)
        return before

    while True:
        k += stride
        for _ in range(3):
            begin()
            tail()
            assert same(taken(other), taken(one))
        before, done = begin(), False
        try:
            CutOff(k, opcodes, None).run(tail)
            done = True
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)
        after, found = taken(one), taken(other)
        if not same(found, after):
            assert not done
            assert same(found, before), "neither before the tail nor after it"
            tail()
            assert same(taken(other), after)
        if done:
            assert tail._fused is not None
            assert tail._fused.led is not None
            assert bool(tail._fused.led.forms) == (lanes > 8)
            return k


WAYS = pytest.mark.parametrize("lanes", [3, 9], ids=["whole", "led"])
KINDS = pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)


@WAYS
@KINDS
@pytest.mark.family(2)
def test_a_steady_tail_is_cut_off_now_and_then(build: Any, lanes: int) -> None:
    assert exhaust(build, lanes, opcodes=False, stride=17) > 100


@pytest.mark.slow
@WAYS
@KINDS
def test_a_steady_tail_is_cut_off_at_every_line(build: Any, lanes: int) -> None:
    assert exhaust(build, lanes, opcodes=False) > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@WAYS
@KINDS
def test_a_steady_tail_is_cut_off_at_every_instruction(build: Any, lanes: int) -> None:
    assert exhaust(build, lanes, opcodes=True) > 500
