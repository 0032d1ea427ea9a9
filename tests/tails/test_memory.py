"""A tail whose memory is shared, empty, in other layouts; and one that is cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.replicate import backend
from tests.tails.test_tail import MAKES
from tests.tails.twins import SHAPES, Side, call, differences, same, tail_of


def compare(
    one: Side, other: Side, tail: Any, change: Callable[[Side], None], steps: int = 6
) -> None:
    """Both sides after each step; every third one overflows."""
    for n in range(steps):
        for side in (one, other):
            side.set_grads(n, n % 3 == 2)
            change(side)
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []


def test_empty_parameters() -> None:
    shapes = [*SHAPES[:3], (0,), (0, 3)]
    one, other = (Side(MAKES["adamw"], shapes, scaled=True) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(5):
        for side in (one, other):
            side.set_grads(n)
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []


@pytest.mark.slow
def test_gradients_in_one_bucket() -> None:
    """All gradients are parts of one tensor, as DistributedDataParallel has them."""

    def bucket(side: Side) -> None:
        grads = [p.grad for p in side.params]
        flat = torch.cat([g.reshape(-1) for g in grads])  # type: ignore[union-attr]
        begin = 0
        for p in side.params:
            p.grad = flat[begin : begin + p.numel()].view(p.shape)
            begin += p.numel()

    one, other = (Side(MAKES["adamw"], scaled=True) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    compare(one, other, tail, bucket)


def test_gradients_of_other_layouts() -> None:
    def turn(side: Side) -> None:
        for p in side.params:
            if p.dim() == 2:
                p.grad = p.grad.t().contiguous().t()  # type: ignore[union-attr]

    one, other = (Side(MAKES["sgd"], scaled=True) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    compare(one, other, tail, turn)


def test_parameters_that_share_a_gradient() -> None:
    """What one tail writes twice runs in pieces, with eager's bits."""

    def share(side: Side) -> None:
        side.params[1].grad = side.params[0].grad

    one, other = (Side(MAKES["sgd"], [(5,), (5,), (3,)]) for _ in range(2))
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
            share(side)
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []


def test_a_shared_gradient_is_unscaled_twice() -> None:
    """As GradScaler does; the norm is that of what it is then."""
    one, other = (Side(MAKES["sgd"], [(5,), (5,), (3,)], scaled=True) for _ in range(2))
    tail = fuseopt.tail(other.opt, scaler=other.scaler, clip_grad_norm=1e-4)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
            side.params[1].grad = side.params[0].grad
        norm = one.eager(1e-4)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []


@pytest.mark.slow
def test_an_interrupt_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was written, and the next call is whole."""
    one, other = (Side(MAKES["adamw"], scaled=True) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    interrupt_a_tail(one, other, tail, backend, "decide", monkeypatch)


def interrupt_a_tail(
    one: Side,
    other: Side,
    tail: Any,
    place: Any,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Raise KeyboardInterrupt where a tail, compiled anew, asks for a function."""
    kept = getattr(place, name)

    def interrupted(*args: Any) -> Any:
        monkeypatch.setattr(place, name, kept)
        raise KeyboardInterrupt

    for n in range(4):
        for side in (one, other):
            side.set_grads(n)
        if n == 2:
            monkeypatch.setattr(place, name, interrupted)
            tail._fused = None
            before = [p.grad.clone() for p in other.params]  # type: ignore[union-attr]
            with pytest.raises(KeyboardInterrupt):
                tail()
            assert all(map(torch.equal, before, [p.grad for p in other.params]))
            assert differences(one, other) == []
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []


@pytest.mark.slow
def test_two_threads() -> None:
    """What one thread compiles is no trace of what the other calls.

    Only tails are called at once: while a thread compiles, torch's own optimizers take
    the steps of all threads for compiled ones.
    """
    pairs = [[Side(MAKES["adamw"], scaled=True) for _ in range(2)] for _ in range(2)]
    for one, other in pairs:
        for n in range(5):
            one.set_grads(n, n == 3)
            one.eager(1.0)
        other.set_grads(0)
    tails = [tail_of(other, clip_grad_norm=1.0) for _, other in pairs]
    for (_, other), tail in zip(pairs, tails, strict=True):
        call(other, tail)
    together = threading.Barrier(2, timeout=60)

    def train(k: int) -> list[str]:
        one, other = pairs[k]
        for n in range(1, 5):
            other.set_grads(n, n == 3)
            together.wait()
            call(other, tails[k])
        return differences(one, other, grads=True)

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(train, range(2))] == [[], []]
