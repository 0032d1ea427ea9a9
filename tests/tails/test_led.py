"""Tails of many lanes: the step of a few is traced, with what stands around it."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.replicate import backend
from fuseopt.tails.tail import Tail
from tests.tails.test_memory import interrupt_a_tail
from tests.tails.test_tail import MAKES
from tests.tails.twins import Side, call, differences, same, tail_of

#: Lanes of three sizes, and numbers without dimensions.
SHAPES = [(5, 3), (7,), (), (4, 4, 2)] * 8


def sides(name: str, **more: Any) -> tuple[Side, Side]:
    one, other = (Side(MAKES[name], SHAPES, **more) for _ in range(2))
    return one, other


def led(tail: Tail) -> bool:
    """Was the last call led by models of lanes?"""
    assert tail._fused is not None
    assert tail._fused.led is not None
    assert tail._fused.led.refusal == ""
    return "lanes; they stand for the others" in fuseopt.reports()[-1].traced


def compare(
    one: Side, other: Side, tail: Tail, n: int, change: Callable[[Side], None] | None
) -> None:
    for side in (one, other):
        side.set_grads(n)
        if change is not None:
            change(side)
    norm = one.eager(1.0, 0.9)
    assert same(call(other, tail).norm, norm)
    assert differences(one, other, grads=True) == []


@pytest.mark.family(12)
@pytest.mark.parametrize("zero_grad", [False, True, "zeros"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "counting", "trust"])
def test_bits_of_a_led_tail(name: str, zero_grad: Any) -> None:
    """Overflows at random calls: parameters, state, counters, averages, scale."""
    one, other = sides(name, scaled=True)
    tail = tail_of(
        other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)], zero_grad=zero_grad
    )
    for n in range(9):
        bad = n in (1, 4, 5)
        for side in (one, other):
            side.set_grads(n, bad)
        norm = one.eager(1.0, 0.9)
        if zero_grad:
            one.opt.zero_grad(set_to_none=zero_grad is True)
        out = call(other, tail)
        assert bool(out.skipped) == bad
        assert same(out.norm, norm)
        assert differences(one, other, grads=True) == []
    assert fuseopt.reports()[-1].launches == (3 if name == "trust" else 2)
    assert led(tail)


def test_forty_bytes_a_parameter() -> None:
    """The same as where all lanes are traced."""
    side = Side(MAKES["adamw"], [(512,)] * 20, scaled=True)
    tail = tail_of(side, clip_grad_norm=1.0, ema=[(side.ema, 0.9)], zero_grad=True)
    for n in range(3):
        side.set_grads(n)
        call(side, tail)
    report = fuseopt.reports()[-1]
    assert report.launches == 2
    moved = sum(k.bytes_per_element * k.elements for k in report.kernels)
    assert 40 <= moved / (20 * 512) < 41
    assert led(tail)


def test_missing_gradients_trace_nothing() -> None:
    """Which gradients there are is drawn for each call."""
    one, other = sides("adamw")
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    draw = random.Random(4)
    for n in range(14):
        missing = [k for k in range(len(SHAPES)) if n > 1 and draw.random() < 0.3]

        def drop(side: Side, missing: list[int] = missing) -> None:
            for k in missing:
                side.params[k].grad = None

        compare(one, other, tail, n, drop)
        if n == 2:
            known = len(fuseopt.reports())
    assert len(fuseopt.reports()) == known
    assert led(tail)


def test_first_gradients_that_come_late() -> None:
    """State is made for lanes that had none, and not where the step is skipped."""
    one, other = sides("counting", scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(7):
        for side in (one, other):
            side.set_grads(n, bad=n in (3, 5))
            for p in side.params[: (0, 8, 8, 8, 4, 4, 0)[n]]:
                p.grad = None
            if n < 1:
                for p in side.params[:8]:
                    p.grad = None
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []
    assert led(tail)


def test_numbers_move() -> None:
    """Limits, decays, divisors: floats or tensors; only another kind is new."""
    one, other = sides("sgd")
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    tail.clip_grad_value = 0.3
    for n in range(8):
        limit, decay, value = 0.5 + n, 0.9 + n / 100, 0.01 * (n + 1)
        for side in (one, other):
            side.set_grads(n)
            side.opt.param_groups[0]["lr"] = 0.1 / (1 + n)
        norm = one.eager(limit, decay, value)
        tail.clip_grad_norm, tail.decays[0], tail.clip_grad_value = limit, decay, value
        if n >= 4:
            tail.clip_grad_norm = torch.tensor(limit)
            tail.clip_grad_value = torch.tensor(value)
            tail.decays[0] = torch.tensor(0.5)
            for a, b, p in zip(one.ema, other.ema, other.params, strict=True):
                a.copy_(b.lerp(p.detach(), 0.0))
        assert same(call(other, tail).norm, norm)
        if n < 4:
            assert differences(one, other, grads=True) == []
        else:
            found = differences(one, other, grads=True)
            assert all(x.startswith("average") for x in found)
        if n in (1, 4):
            known = len(fuseopt.reports())
        if n in (3, 7):
            assert len(fuseopt.reports()) == known
    assert led(tail)


def test_numbers_that_are_one_object() -> None:
    """Such as a constant that is written twice. All lanes were traced for that."""
    one, other = sides("sgd")
    four, eight = 4.0, 8.0
    tail = tail_of(other, grad_divisor=four, clip_grad_value=four)
    for n in range(6):
        if n == 4:
            tail.grad_divisor = tail.clip_grad_value = eight
        if n == 5:
            tail.clip_grad_value = four
        for side in (one, other):
            side.set_grads(n)
        torch._foreach_div_([p.grad for p in one.params], eight if n > 3 else four)
        one.eager(max_value=eight if n == 4 else four)
        call(other, tail)
        assert differences(one, other, grads=True) == []
        assert n == 0 or led(tail)


@pytest.mark.slow
def test_every_second_call_averages() -> None:
    """Two forms, each traced once."""
    one, other = sides("adamw")
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(9):
        for side in (one, other):
            side.set_grads(n)
        one.eager(1.0, 0.9 if n % 2 else None)
        tail(average=bool(n % 2))
        assert differences(one, other, grads=True) == []
        if n == 3:
            known = len(fuseopt.reports())
    assert len(fuseopt.reports()) == known
    assert led(tail)


def test_a_divisor_and_copies_of_other_dtypes() -> None:
    side, other = sides("sgd")
    copies = [p.detach().to(torch.bfloat16) for p in other.params]
    wide = [p.detach().double() for p in other.params]
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(wide, 0.9)], copies=copies)
    want = [p.detach().double() for p in side.params]
    for n in range(4):
        tail.grad_divisor = 4 if n < 3 else torch.tensor(4.0)
        for x in (side, other):
            x.set_grads(n)
        torch._foreach_div_([p.grad for p in side.params], 4)
        norm = side.eager(1.0)
        with torch.no_grad():
            torch._foreach_lerp_(want, [p.double() for p in side.params], 1 - 0.9)
        assert same(call(other, tail).norm, norm)
        assert differences(side, other, grads=True) == []
        assert all(map(torch.equal, want, wide))
        for p, own in zip(other.params, copies, strict=True):
            assert torch.equal(p.detach().to(torch.bfloat16), own)
    assert led(tail)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    one, other = sides("adamw", dtype=dtype, scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(5):
        for side in (one, other):
            side.set_grads(n, n == 3)
        norm = one.eager(1.0, 0.9)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []
    assert led(tail)


@pytest.mark.slow
def test_dtypes_that_change_their_order() -> None:
    """Norms of two dtypes are added up in torch's order of these, which that of the
    first gradient has a part in: a thawed layer changes it.
    """
    one, other = sides("sgd")
    for side in (one, other):
        for k, p in enumerate(side.params):
            p.data = p.data.to((torch.bfloat16, torch.float32, torch.float64)[k % 3])
        side.ema = [p.detach().clone() for p in side.params]
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(8):

        def drop(side: Side, missing: int = n % 4) -> None:
            side.params[missing].grad = None

        compare(one, other, tail, n, drop)
    assert led(tail)


@pytest.mark.slow
def test_other_state_and_other_lanes() -> None:
    one, other = sides("adamw")
    tail = tail_of(other, clip_grad_norm=1.0)

    def compare(n: int) -> None:
        for side in (one, other):
            side.set_grads(n)
        one.eager(1.0)
        call(other, tail)
        assert differences(one, other, grads=True) == []

    for n in range(3):
        compare(n)
    saved = copy.deepcopy(one.opt.state_dict())
    for side in (one, other):
        side.opt.load_state_dict(copy.deepcopy(saved))
    compare(3)
    for side in (one, other):
        more = torch.nn.Parameter(torch.ones(11))
        side.params.append(more)
        side.ema.append(more.detach().clone())
        side.opt.add_param_group({"params": [more], "lr": 0.5})
    for n in range(4, 7):
        compare(n)
    assert led(tail)


def test_averages_that_move() -> None:
    """The user gives an average other memory, or an average of another dtype."""
    one, other = sides("sgd")
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(6):
        if n == 3:
            other.ema[5].data = other.ema[5].data.clone()
        if n == 4:
            for side in (one, other):
                side.params[1].data = side.params[1].data.clone()
        compare(one, other, tail, n, None)
    assert led(tail)


@pytest.mark.family(4)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_averages_that_come_to_have_another_dtype(
    dtype: torch.dtype, every: int
) -> None:
    """Their memory was written as if they had the dtype of before."""
    one, other = sides("sgd")
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(10):
        if n in (5, 8):
            for average in (*one.ema, *other.ema):
                average.data = average.to(dtype if n == 5 else torch.float32)
        for side in (one, other):
            side.set_grads(n)
        norm = one.eager(1.0)
        if n % every == 0:
            cast = [p.detach().to(one.ema[0].dtype) for p in one.params]
            torch._foreach_lerp_(one.ema, cast, 1 - 0.9)
        assert same(tail(average=n % every == 0).norm, norm)
        assert differences(one, other, grads=True) == []
    assert led(tail)


def turned(t: torch.Tensor) -> torch.Tensor:
    return t.detach().t().contiguous().t()


def test_averages_that_lie_otherwise_are_traced_whole() -> None:
    """And a Report says why."""
    shapes = [(6, 4)] * 20
    one, other = (Side(MAKES["sgd"], shapes) for _ in range(2))
    for side in (one, other):
        side.ema = [turned(p) for p in side.params]
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(3):
        compare(one, other, tail, n, None)
    traced = fuseopt.reports()[-1].traced
    assert traced.startswith("a tail of a training step, all lanes, since an average ")


@pytest.mark.slow
def test_averages_that_share_memory() -> None:
    """Two lanes' averages in one memory are no case for a kernel of lanes."""
    one, other = (Side(MAKES["sgd"], [(6,)] * 20) for _ in range(2))
    for side in (one, other):
        side.ema[3] = side.ema[2]
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(4):
        compare(one, other, tail, n, None)


@pytest.mark.family(2)
@pytest.mark.parametrize("when", ["compiled", "traced"])
def test_an_interrupt(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was written, and the next call is whole."""
    one, other = sides("adamw", scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    name = "decide" if when == "traced" else "LedStep"
    interrupt_a_tail(one, other, tail, backend, name, monkeypatch)
    assert led(tail)


def test_the_norm_that_is_returned_stays() -> None:
    """It is nobody's but the caller's: the next call does not overwrite it."""
    side = sides("sgd", scaled=True)[0]
    tail = tail_of(side, clip_grad_norm=1.0)
    outs = []
    for n in range(5):
        side.set_grads(n, n == 3)
        outs.append(call(side, tail))
    norms = [float(out.norm) for out in outs if out.norm is not None]
    assert len(norms) == len({*map(str, norms)}) == 5
    assert [bool(out.skipped) for out in outs] == [False] * 3 + [True, False]


@pytest.mark.slow
def test_nothing_is_kept_of_a_tail_that_is_dropped() -> None:
    def used() -> list[Any]:
        side = sides("adamw")[0]
        tail = tail_of(side, clip_grad_norm=1.0, ema=[(side.ema, 0.9)])
        for n in range(3):
            side.set_grads(n)
            tail()
        assert led(tail)
        return [*map(weakref.ref, (side.opt, side.params[0], side.ema[0], tail))]

    dead = used()
    gc.collect()
    assert [x() for x in dead] == [None, None, None, None]
