"""Adaptive gradient clipping: no unit's gradient longer than a part of its weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.packages import module_of
from tests.tails.test_tail import last_report
from tests.tails.twins import Side, call, differences, same, tail_of

SHAPES = [(7, 5), (13,), (4, 3, 3, 3), (), (64,), (1, 1), (6, 1, 2)]


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3)


def unit_norm(x: torch.Tensor) -> torch.Tensor:
    if x.ndim <= 1:
        return x.norm(2.0)
    return x.norm(2.0, dim=(*range(1, x.ndim),), keepdim=True)


def clip(side: Side, factor: float, eps: float) -> None:
    """|g| is at most factor * max(|w|, eps), for each unit."""
    with torch.no_grad():
        for p in side.params:
            assert p.grad is not None
            most = unit_norm(p).clamp(min=eps) * factor
            norm = unit_norm(p.grad)
            less = p.grad * (most / norm.clamp(min=1e-6))
            p.grad.copy_(torch.where(norm < most, p.grad, less))


def eager(
    side: Side, factor: float, eps: float, max_norm: float | None = None
) -> torch.Tensor | None:
    norm = None
    if side.scaler is not None:
        side.scaler.unscale_(side.opt)
    if max_norm is not None:
        norm = torch.nn.utils.clip_grad_norm_(side.params, max_norm)
    clip(side, factor, eps)
    if side.scaler is None:
        side.opt.step()
    else:
        side.scaler.step(side.opt)
        side.scaler.update()
    return norm


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_bits_of_the_formula(scaled: bool, dtype: torch.dtype) -> None:
    """Filters, rows, vectors; the factor moves, and some units are not clipped."""
    one, other = (Side(adamw, SHAPES, dtype, scaled) for _ in range(2))
    tail = tail_of(other, clip_grad_adaptive=(0.01, 1e-3))
    for n in range(6):
        factor, eps = (0.01, 1e-3) if n < 3 else (0.5 * n, 0.1)
        tail.clip_grad_adaptive = factor, eps
        for side in (one, other):
            side.set_grads(n, scaled and n in (0, 4))
            if n % 2:
                torch._foreach_mul_([p.grad for p in side.params], 1e-2)
        eager(one, factor, eps)
        call(other, tail)
        assert differences(one, other, grads=True) == []
    assert last_report().launches == 2


#: As many lanes as are led, of four shapes.
MANY = [(7, 5), (13,), (4, 3, 3, 3), ()] * 5


@pytest.mark.family(12)
@pytest.mark.parametrize("clips", ["alone", "norm", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
def test_of_many_lanes_a_few_are_traced(
    scaled: bool, dtype: torch.dtype, clips: str
) -> None:
    """Alone, or behind the other clips; numbers, then tensors, all of which move.

    Where a flag would be a launch of its own, all lanes are traced.
    """
    one, other = (Side(adamw, MANY, dtype, scaled) for _ in range(2))
    tail = tail_of(other, clip_grad_adaptive=(0.01, 1e-3), zero_grad="zeros")
    tail.clip_grad_norm = 2.0 if clips == "norm" else None
    tail.clip_grad_value = 0.5 if clips == "value" else None
    for n in range(8):
        factor, eps = (0.01, 1e-3) if n < 3 else (0.5 * n, 0.1)
        tail.clip_grad_adaptive = factor, eps
        if n > 4:
            tail.clip_grad_adaptive = torch.tensor(factor), torch.tensor([eps])
        for side in (one, other):
            side.set_grads(n, scaled and n in (0, 4))
            if n % 2:
                torch._foreach_mul_([p.grad for p in side.params], 1e-2)
        before = eager_before(one, clips)
        clip(one, factor, eps)
        eager_after(one)
        assert same(call(other, tail).norm, before)
        for p in one.params:
            assert p.grad is not None
            p.grad.zero_()
        assert differences(one, other, grads=True) == []
    few = "they stand for the others" in last_report().traced
    assert few == (clips != "alone" or not scaled)
    third = clips == "norm" or (clips == "value" and scaled)
    assert last_report().launches == 2 + third


def eager_before(side: Side, clips: str) -> torch.Tensor | None:
    if side.scaler is not None:
        side.scaler.unscale_(side.opt)
    if clips == "value":
        torch.nn.utils.clip_grad_value_(side.params, 0.5)
    if clips != "norm":
        return None
    return torch.nn.utils.clip_grad_norm_(side.params, 2.0)


def eager_after(side: Side) -> None:
    if side.scaler is None:
        side.opt.step()
    else:
        side.scaler.step(side.opt)
        side.scaler.update()


@pytest.mark.slow
def test_of_means_of_micro_batches() -> None:
    one, other = Side(adamw, SHAPES), Side(adamw, SHAPES)
    tail = tail_of(other, clip_grad_adaptive=0.02, grad_divisor=3.0, zero_grad=True)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        for p in one.params:
            p.grad.div_(3.0)  # type: ignore[union-attr]
        eager(one, 0.02, 1e-3)
        call(other, tail)
        assert differences(one, other) == []
    assert last_report().launches == 2


def test_steps_whose_norm_is_not_finite() -> None:
    one, other = Side(adamw, SHAPES), Side(adamw, SHAPES)
    tail = tail_of(other, clip_grad_adaptive=0.02, skip_nonfinite=True)
    for n in range(5):
        for side in (one, other):
            side.set_grads(n, n == 2)
        if n == 2:
            clip(one, 0.02, 1e-3)
        else:
            eager(one, 0.02, 1e-3)
        assert bool(call(other, tail).skipped) == (n == 2)
        assert differences(one, other, grads=True) == []
    assert last_report().launches == 2


def test_behind_the_other_clips() -> None:
    one, other = (Side(adamw, SHAPES, scaled=True) for _ in range(2))
    tail = tail_of(other, clip_grad_norm=1.0, clip_grad_adaptive=0.02, zero_grad=True)
    for n in range(4):
        for side in (one, other):
            side.set_grads(n, n == 2)
        norm = eager(one, 0.02, 1e-3, 1.0)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other) == []


def test_the_packages_own() -> None:
    agc = module_of("timm", "utils/agc.py")
    one, other = Side(adamw, SHAPES), Side(adamw, SHAPES)
    tail = tail_of(other, clip_grad_adaptive=(0.01, 1e-3))
    for n in range(4):
        for side in (one, other):
            side.set_grads(n)
        agc.adaptive_clip_grad(one.params, 0.01, 1e-3)
        one.opt.step()
        call(other, tail)
        assert differences(one, other, grads=True) == []


def test_in_pieces_and_without_gradients() -> None:
    one, other = Side(adamw, SHAPES), Side(adamw, SHAPES)
    other.opt.register_step_post_hook(lambda *args: None)
    tail = fuseopt.tail(other.opt, clip_grad_adaptive=(0.01, 1e-3))
    tail()  # there is nothing to clip, and nothing is
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        eager(one, 0.01, 1e-3)
        call(other, tail)
        assert differences(one, other, grads=True) == []


def test_a_gradient_of_two_parameters() -> None:
    """It is divided, clipped and measured twice, one after the other, as in eager."""
    one, other = (Side(adamw, [(5, 2), (5, 2), (3,)]) for _ in range(2))
    options = {"clip_grad_adaptive": 0.01, "grad_divisor": 3, "stats": True}
    tail = fuseopt.tail(other.opt, **options)  # type: ignore[arg-type]
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
            side.params[1].grad = side.params[0].grad
        for p in one.params:
            p.grad.div_(3)  # type: ignore[union-attr]
        norms = [float(p.grad.norm()) for p in one.params]  # type: ignore[union-attr]
        eager(one, 0.01, 1e-3)
        stats = call(other, tail).stats
        assert stats is not None
        assert stats[:, 0].tolist() == norms
        assert differences(one, other, grads=True) == []


@pytest.mark.parametrize("wrong", [0, (0.1, 0.0), (0.1,), (None, 1.0), float("nan")])
def test_what_is_no_factor(wrong: Any) -> None:
    side = Side(adamw)
    with pytest.raises(ValueError, match="clip_grad_adaptive"):
        tail_of(side, clip_grad_adaptive=wrong)
