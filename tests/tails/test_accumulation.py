"""The mean over micro-batches: `g.div_(n)` before everything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.test_tail import MAKES, last_report
from tests.tails.twins import Side, call, differences, same, tail_of


def divide(side: Side, n: Any) -> None:
    for p in side.params:
        assert p.grad is not None
        p.grad.div_(n)


@pytest.mark.family(4)
@pytest.mark.parametrize(
    ("dtype", "scaled", "clip"),
    [
        (torch.float32, False, None),
        (torch.float32, True, 1.0),
        (torch.bfloat16, True, None),
        (torch.float64, False, 1.0),
    ],
)
def test_bits_of_a_division(
    dtype: torch.dtype, scaled: bool, clip: float | None
) -> None:
    """By a number that is no power of two, and moves; infinities come after it."""
    one, other = (Side(MAKES["adamw"], dtype=dtype, scaled=scaled) for _ in range(2))
    tail = tail_of(other, grad_divisor=3, clip_grad_norm=clip, ema=[(other.ema, 0.9)])
    for n in range(7):
        for side in (one, other):
            side.set_grads(n, scaled and n == 4)
        tail.grad_divisor = 3 + n // 3 * 2
        divide(one, 3 + n // 3 * 2)
        norm = one.eager(clip, 0.9)
        out = call(other, tail)
        assert norm is None or same(out.norm, norm)
        assert differences(one, other, grads=True) == []


def test_what_it_costs() -> None:
    """No memory: the gradient is read twice, as without it."""
    side = Side(MAKES["adamw"], [(4096,)] * 4, scaled=True)
    tail = tail_of(side, clip_grad_norm=1.0, zero_grad=True, grad_divisor=3.0)
    for n in range(3):
        side.set_grads(n)
        call(side, tail)
    report = last_report()
    moved = sum(k.bytes_per_element * k.elements for k in report.kernels)
    assert report.launches == 2
    assert moved / (4 * 4096) < 32.1


@pytest.mark.slow
def test_tensors_and_numbers_of_one_call() -> None:
    """A tensor that changes, and a window that is shorter once."""
    one, other = (Side(MAKES["sgd"], scaled=True) for _ in range(2))
    divisor = torch.tensor(4.0)
    tail = tail_of(other, clip_grad_norm=1.0, grad_divisor=divisor)
    for n in range(8):
        for side in (one, other):
            side.set_grads(n, n == 6)
        divisor.fill_(4.0 + n)
        # in the last windows there was less to add up
        fewer = {3: 3, 5: 2}.get(n)
        divide(one, fewer or divisor)
        one.eager(1.0)
        tail(accumulated=fewer)
        other.scaler.update()
        assert differences(one, other, grads=True) == []


def test_after_the_users_own_unscale() -> None:
    one, other = (Side(MAKES["adamw"], scaled=True) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, grad_divisor=3)
    for n in range(4):
        for side in (one, other):
            side.set_grads(n, n == 2)
            side.scaler.unscale_(side.opt)
        divide(one, 3)
        torch.nn.utils.clip_grad_norm_(one.params, 1.0)
        one.scaler.step(one.opt)
        one.scaler.update()
        call(other, tail)
        assert differences(one, other, grads=True) == []


def test_in_pieces_and_refused() -> None:
    one, other = (Side(MAKES["sgd"], scaled=True) for _ in range(2))
    other.opt.register_step_pre_hook(lambda *args: None)
    tail = fuseopt.tail(other.opt, scaler=other.scaler, grad_divisor=3)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n, n == 1)
        divide(one, 3)
        one.eager()
        call(other, tail)
        assert differences(one, other, grads=True) == []
    before = [p.grad.clone() for p in other.params]  # type: ignore[union-attr]
    for wrong in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="grad_divisor is"):
            tail(accumulated=wrong)
    assert all(map(torch.equal, before, [p.grad for p in other.params]))
