"""A tail that is cut off at any line has done nothing yet, or all of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler.session import COMPILED
from tests.shadow.test_untouched import BUILDS, CutOff, content, same
from tests.tails.twins import Side

SHAPES = [(3, 4), (5,)]


@pytest.fixture(autouse=True)
def gradients_are_recorded() -> Iterator[None]:
    yield
    sys.settrace(None)
    torch.set_grad_enabled(True)


class WholeTail:
    """A tail that clips, steps and averages, and may skip all of it."""

    decay: float | None = 0.9

    def __init__(self, side: Side) -> None:
        self.call = self.tail = fuseopt.tail(
            side.opt,
            clip_grad_norm=1.0,
            ema=[(side.ema, self.decay)],
            skip_nonfinite=True,
            fallback="error",
        )

    def begin(self) -> None:
        """Nothing comes before it."""

    @property
    def led(self) -> bool:
        """Do a few lanes lead it?"""
        fused = self.tail._fused
        return fused is not None and fused.led is not None and bool(fused.led.forms)


class DeferredClip:
    """A step to which a clip is left."""

    decay = None

    def __init__(self, side: Side) -> None:
        self.side = side
        self.call = fuseopt.compile(side.opt).step

    def begin(self) -> None:
        """Clip."""
        fuseopt.clip_grad_norm_(self.side.params, 1.0, defer="unsafe")

    @property
    def led(self) -> bool:
        """Do a few lanes lead it?"""
        clipped = getattr(self.side.opt.step, COMPILED).clipped
        led = clipped.single_graph.led
        assert not clipped.single_graph.refusal
        return led is not None and bool(led.forms)


def taken(side: Side, way: WholeTail | DeferredClip) -> Any:
    """All that it may write; a clip that is deferred never writes gradients."""
    states = [
        {k: content(v) for k, v in side.opt.state[p].items()} for p in side.params
    ]
    groups = [
        {k: v for k, v in group.items() if k != "params"}
        for group in side.opt.param_groups
    ]
    clipped = way.decay is not None
    tensors = [
        content(t) for p in side.params for t in ((p, p.grad) if clipped else (p,))
    ]
    return tensors, [content(t) for t in side.ema], states, groups


def exhaust(
    build: Any,
    lanes: int,
    opcodes: bool,
    stride: int = 1,
    kind: Any = WholeTail,
    moves: bool = False,
) -> int:
    """Cut a steady tail off at every event, or at some; how many there are.

    `moves`: each call has another rate, and needs more Python than one call of C.
    """
    one, other = (Side(build, SHAPES * lanes) for _ in range(2))
    way = kind(other)
    seed = k = 0

    def begin() -> Any:
        nonlocal seed
        seed += 1
        for side in (one, other):
            side.set_grads(seed)
            for group in side.opt.param_groups if moves else ():
                group["lr"] = 0.1 / seed
        before = taken(other, way) if seed > 1 else None
        one.eager(1.0, way.decay)
        way.begin()
        return before

    while True:
        k += stride
        for _ in range(3):
            begin()
            way.call()
            assert same(taken(other, way), taken(one, way))
        before, done = begin(), False
        try:
            CutOff(k, opcodes, None).run(way.call)
            done = True
        except KeyboardInterrupt:
            torch.set_grad_enabled(True)
        after, found = taken(one, way), taken(other, way)
        if not same(found, after):
            assert not done
            assert same(found, before), "neither before the tail nor after it"
            way.call()
            assert same(taken(other, way), after)
        if done:
            assert way.led == (lanes > 8)
            return k


WAYS = pytest.mark.parametrize("lanes", [2, 9], ids=["whole", "led"])
KINDS = pytest.mark.parametrize("build", BUILDS, ids=lambda f: f.__name__)
MOVES = pytest.mark.parametrize("moves", [True, False], ids=["moving", "resting"])


@WAYS
@KINDS
@MOVES
@pytest.mark.slow
def test_a_steady_tail_is_cut_off_now_and_then(
    build: Any, lanes: int, moves: bool
) -> None:
    least = 100 if moves else 30
    assert exhaust(build, lanes, opcodes=False, stride=17, moves=moves) > least


@pytest.mark.slow
@WAYS
@KINDS
@MOVES
def test_a_steady_tail_is_cut_off_at_every_line(
    build: Any, lanes: int, moves: bool
) -> None:
    assert exhaust(build, lanes, opcodes=False, moves=moves) > (100 if moves else 30)


@pytest.mark.slow
@WAYS
@KINDS
def test_a_step_with_a_deferred_clip_is_cut_off(build: Any, lanes: int) -> None:
    assert exhaust(build, lanes, opcodes=False, kind=DeferredClip) > 100


@pytest.mark.slow
@pytest.mark.timeout(3600)
@WAYS
@KINDS
@MOVES
def test_a_steady_tail_is_cut_off_at_every_instruction(
    build: Any, lanes: int, moves: bool
) -> None:
    assert exhaust(build, lanes, opcodes=True, moves=moves) > (500 if moves else 150)
