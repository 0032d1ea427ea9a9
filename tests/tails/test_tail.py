"""A tail gives the bits of what trainers write, in two launches."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from tests.tails.twins import SHAPES, Make, Side, call, differences, same, tail_of


class Counting(Optimizer):
    """A loop over lanes; its counter is a number of Python's, its buffer is made when
    the first gradient comes, and is that.
    """

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["buf"] = p.grad.clone()
                state["step"] += 1
                state["buf"].mul_(0.9).add_(p.grad, alpha=1 - 0.5 ** state["step"])
                p.sub_(state["buf"], alpha=group["lr"])


class Trust(Optimizer):
    """Layer-wise trust ratios, as LAMB has them."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                    state["v"] = torch.zeros_like(p)
                m, v, g = state["m"], state["v"], p.grad
                m.mul_(0.9).add_(g, alpha=0.1)
                v.mul_(0.99).addcmul_(g, g, value=0.01)
                update = m / (v.sqrt() + 1e-6) + 0.01 * p
                ratio = p.norm() / update.norm().clamp(min=1e-6)
                p.sub_(update * ratio, alpha=group["lr"])


#: An element that generated code reads, and one that it writes.
LOADED, STORED = r"= (p\d+)\[i \+ j\];", r"(p\d+)\[i \+ j\] ="

MAKES: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-3),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "counting": Counting,
    "trust": Trust,
}


def last_report() -> fuseopt.Report:
    return fuseopt.reports()[-1]


@pytest.mark.family(4)
@pytest.mark.parametrize("name", ["adamw", "sgd", "counting", "trust"])
def test_bits_of_clip_step_and_average(name: str) -> None:
    one, other = Side(MAKES[name]), Side(MAKES[name])
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(4):
        one.set_grads(n)
        other.set_grads(n)
        norm = one.eager(1.0, 0.9)
        out = call(other, tail)
        assert same(out.norm, norm)
        assert out.skipped is False
        assert differences(one, other, grads=True) == []
    assert last_report().launches == (3 if name == "trust" else 2)


@pytest.mark.family(4)
@pytest.mark.parametrize("name", ["adamw", "sgd", "counting", "trust"])
def test_overflows_at_random_steps(name: str) -> None:
    """Parameters, state, counters and scale are eager's, from the first step on."""
    one, other = Side(MAKES[name], scaled=True), Side(MAKES[name], scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)], zero_grad=True)
    draw = torch.Generator().manual_seed(3)
    skipped = 0
    for n in range(60):
        bad = n < 2 or bool(torch.rand((), generator=draw) < 0.25)
        one.set_grads(n, bad)
        other.set_grads(n, bad)
        norm = one.eager(1.0, 0.9)
        out = call(other, tail)
        assert bool(out.skipped) == bad
        assert same(out.norm, norm)
        assert differences(one, other) == []
        assert all(p.grad is None for p in other.params)
        skipped += bad
    assert 5 < skipped < 40


def test_three_hundred_steps_of_a_scaler() -> None:
    one = Side(MAKES["adamw"], SHAPES[:3], scaled=True)
    other = Side(MAKES["adamw"], SHAPES[:3], scaled=True)
    tail = tail_of(other)
    draw = torch.Generator().manual_seed(11)
    skipped = 0
    for n in range(300):
        bad = bool(torch.rand((), generator=draw) < 0.1)
        skipped += bad
        one.set_grads(n, bad)
        other.set_grads(n, bad)
        one.eager()
        out = call(other, tail)
        assert bool(out.skipped) == bad
        assert out.norm is None
        assert differences(one, other) == []
    assert 10 < skipped < 60
    assert last_report().launches == 2


def test_forty_bytes_a_parameter() -> None:
    """Of AdamW with unscale, skip, clip and average: the gradient is read twice, and
    four tensors are read and written. The generated loads and stores say the same.
    """
    side = Side(MAKES["adamw"], [(4096,)] * 4, scaled=True)
    tail = tail_of(side, clip_grad_norm=1.0, ema=[(side.ema, 0.9)], zero_grad=True)
    for n in range(3):
        side.set_grads(n)
        call(side, tail)
    report = last_report()
    assert report.launches == 2
    moved = sum(k.bytes_per_element * k.elements for k in report.kernels)
    assert 40 <= moved / (4 * 4096) < 40.1
    first, second = (k.source for k in report.kernels)
    # the norms' kernel reads each element once and writes numbers alone
    rows = re.findall(r"void row\d+\(.*?\n}\n", first, re.DOTALL)
    assert [len({*re.findall(LOADED, row)}) for row in rows] == [1] * len(rows)
    assert not re.findall(STORED, first)
    loads, stores = ({*re.findall(x, second)} for x in (LOADED, STORED))
    assert (len(loads), len(stores)) == (5, 4)


def test_what_is_not_thrown_away_is_written() -> None:
    """The clipped gradients stay, or zeros."""
    for zero_grad, left in ((False, None), ("zeros", 0.0)):
        one, other = Side(MAKES["sgd"]), Side(MAKES["sgd"])
        tail = tail_of(other, clip_grad_norm=1.0, zero_grad=zero_grad)
        for n in range(3):
            one.set_grads(n)
            other.set_grads(n)
            one.eager(1.0)
            held = [p.grad for p in other.params]
            call(other, tail)
            assert all(p.grad is g for p, g in zip(other.params, held, strict=True))
            if left is not None:
                assert all(bool((p.grad == left).all()) for p in other.params)
            assert differences(one, other, grads=left is None) == []


@pytest.mark.family(4)
@pytest.mark.parametrize("lanes", [3, 20])
@pytest.mark.parametrize("zero_grad", [1, np.bool_(True), 0, np.bool_(False)])
def test_zero_grad_that_equals_a_bool(zero_grad: Any, lanes: int) -> None:
    """What is 1 and not True was accepted, and left gradients where they were."""
    side = Side(MAKES["sgd"], [(3,)] * lanes)
    tail = tail_of(side, clip_grad_norm=1.0, zero_grad=zero_grad)
    for n in range(4):
        side.set_grads(n)
        tail()
        assert all((p.grad is None) == bool(zero_grad) for p in side.params)


@pytest.mark.slow
def test_numbers_are_live() -> None:
    """Limits, decays, the learning rate: other numbers, floats or tensors, at any
    time; a number that moves does not compile again and again.
    """
    one, other = Side(MAKES["adamw"]), Side(MAKES["adamw"])
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(9):
        limit, decay = 0.5 + n, 0.9 + n / 100
        for side in (one, other):
            side.set_grads(n)
            side.opt.param_groups[0]["lr"] = 1e-3 / (1 + n)
        one.eager(limit, decay)
        tail.clip_grad_norm, tail.decays[0] = limit, decay
        call(other, tail)
        assert differences(one, other, grads=True) == []
        if n == 4:
            known = len(fuseopt.reports())
    assert len(fuseopt.reports()) == known
    tail.clip_grad_norm = torch.tensor(2.0)
    for n in range(3):
        tail.clip_grad_norm.fill_(2.0 + n)
        for side in (one, other):
            side.set_grads(n)
        one.eager(2.0 + n, decay)
        call(other, tail)
        assert differences(one, other, grads=True) == []


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms_and_values(norm_type: float) -> None:
    one, other = Side(MAKES["sgd"]), Side(MAKES["sgd"])
    tail = tail_of(other, clip_grad_norm=0.5, norm_type=norm_type, clip_grad_value=0.01)
    for n in range(3):
        one.set_grads(n)
        other.set_grads(n)
        norm = one.eager(0.5, None, 0.01, norm_type)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    one = Side(MAKES["adamw"], dtype=dtype, scaled=True)
    other = Side(MAKES["adamw"], dtype=dtype, scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(6):
        for side in (one, other):
            side.set_grads(n, n == 4)
            with torch.no_grad():
                for p in side.params:
                    p.grad.mul_(3.7)  # type: ignore[union-attr]
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []


@pytest.mark.parametrize("scaled", [False, True])
def test_norms_of_several_dtypes(scaled: bool) -> None:
    """They are summed up in the order in which eager goes over dtypes."""
    one, other = (Side(MAKES["sgd"], SHAPES * 3, scaled=scaled) for _ in range(2))
    for side in (one, other):
        kinds = torch.bfloat16, torch.float32
        for k, p in enumerate(side.params):
            p.data = p.data.to(kinds[k % 2])
    tail = tail_of(other, clip_grad_norm=1.0)
    for n in range(8):
        for side in (one, other):
            side.set_grads(n)
        assert same(call(other, tail).norm, one.eager(1.0))
        assert differences(one, other, grads=True) == []


def test_copies_get_what_parameters_are() -> None:
    side = Side(MAKES["sgd"])
    copies = [p.detach().to(torch.bfloat16) for p in side.params]
    tail = tail_of(side, copies=copies)
    for n in range(3):
        side.set_grads(n)
        call(side, tail)
        for p, own in zip(side.params, copies, strict=True):
            assert torch.equal(p.detach().to(torch.bfloat16), own)


def test_skip_of_a_norm_that_is_not_finite() -> None:
    side = Side(MAKES["adamw"])
    tail = tail_of(side, clip_grad_norm=1.0, skip_nonfinite=True)
    for n in range(6):
        bad = n in (0, 3)
        side.set_grads(n, bad)
        before = [p.detach().clone() for p in side.params]
        steps = [float(s["step"]) for s in side.opt.state.values()]
        assert bool(tail().skipped) == bad
        stayed = all(map(torch.equal, before, side.params))
        assert stayed == bad
        if bad:
            assert steps == [float(s["step"]) for s in side.opt.state.values()]


def test_error_of_a_norm_that_is_not_finite() -> None:
    one, other = Side(MAKES["sgd"]), Side(MAKES["sgd"])
    tail = tail_of(other, clip_grad_norm=1.0, error_if_nonfinite=True)
    for n in range(3):
        one.set_grads(n)
        other.set_grads(n)
        one.eager(1.0)
        call(other, tail)
        assert differences(one, other, grads=True) == []
    other.set_grads(3, bad=True)
    with pytest.raises(RuntimeError, match="non-finite, so it cannot be clipped"):
        tail()
    assert differences(one, other) == []


def test_several_optimizers_in_one_tail() -> None:
    """One norm over all; each is skipped for what is in its own gradients."""

    def sides() -> tuple[Side, Side]:
        return Side(MAKES["adamw"], scaled=True), Side(MAKES["sgd"], SHAPES[:2])

    one, two = sides()
    three, four = sides()
    tail = fuseopt.tail(
        [three.opt, four.opt],
        scaler=three.scaler,
        clip_grad_norm=1.0,
        ema=[(three.ema, three.params, 0.9)],
        fallback="error",
        check=True,
    )
    for n in range(8):
        for a, b in ((one, two), (three, four)):
            a.set_grads(n, n == 3)
            b.set_grads(n + 1, n in (0, 5))
        scaler = one.scaler
        for side in (one, two):
            scaler.unscale_(side.opt)
        norm = torch.nn.utils.clip_grad_norm_([*one.params, *two.params], 1.0)
        for side in (one, two):
            scaler.step(side.opt)
        with torch.no_grad():
            torch._foreach_lerp_(one.ema, one.params, 1 - 0.9)
        scaler.update()
        out = tail()
        three.scaler.update()
        assert same(out.norm, norm)
        assert [bool(x) for x in out.skips] == [n == 3, n in (0, 5)]
        assert bool(out.skipped) == (n in (0, 3, 5))
        assert differences(one, three, grads=True) == []
        assert differences(two, four, grads=True) == []
    assert last_report().launches == 2


def test_gradients_that_were_unscaled_before() -> None:
    one, other = Side(MAKES["adamw"], scaled=True), Side(MAKES["adamw"], scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0)
    for n in range(6):
        for side in (one, other):
            side.set_grads(n, n == 3)
        other.scaler.unscale_(other.opt)
        one.eager(1.0)
        assert bool(call(other, tail).skipped) == (n == 3)
        assert differences(one, other, grads=True) == []


def test_a_disabled_scaler_is_none() -> None:
    one, other = Side(MAKES["sgd"]), Side(MAKES["sgd"])
    other.scaler = torch.amp.GradScaler("cpu", enabled=False)
    tail = tail_of(other)
    for n in range(3):
        one.set_grads(n)
        other.set_grads(n)
        one.eager()
        tail()
    other.scaler = None
    assert differences(one, other) == []


def test_other_state_and_other_lanes() -> None:
    """load_state_dict, a group that is added, a gradient that is missing."""
    one, other = Side(MAKES["adamw"]), Side(MAKES["adamw"])
    tail = tail_of(other, clip_grad_norm=1.0)

    def compare(n: int, missing: int = -1) -> None:
        for side in (one, other):
            side.set_grads(n)
            if missing >= 0:
                side.params[missing].grad = None
        one.eager(1.0)
        call(other, tail)
        assert differences(one, other, grads=missing < 0) == []

    for n in range(3):
        compare(n)
    saved = copy.deepcopy(one.opt.state_dict())
    compare(3)
    for side in (one, other):
        side.opt.load_state_dict(copy.deepcopy(saved))
    compare(4)
    compare(5)
    compare(6, missing=1)
    compare(7)
    for side in (one, other):
        more = torch.nn.Parameter(torch.ones(11))
        side.params.append(more)
        side.ema.append(more.detach().clone())
        side.opt.add_param_group({"params": [more], "lr": 0.5})
    compare(8)
    compare(9)


def test_a_step_that_was_compiled_before() -> None:
    one, other = Side(MAKES["fused"]), Side(MAKES["fused"])
    fuseopt.compile(other.opt)
    tail = tail_of(other, clip_grad_norm=1.0)
    reference = Side(MAKES["adamw"])
    for n in range(3):
        for side in (reference, other):
            side.set_grads(n)
        reference.eager(1.0)
        call(other, tail)
    assert all(map(torch.equal, reference.params, other.params))
    assert one.opt.param_groups[0]["fused"] is True


def test_an_infinite_limit_measures() -> None:
    one, other = Side(MAKES["sgd"]), Side(MAKES["sgd"])
    tail = tail_of(other, clip_grad_norm=float("inf"))
    for n in range(3):
        one.set_grads(n)
        other.set_grads(n)
        assert same(call(other, tail).norm, one.eager(float("inf")))
        assert differences(one, other, grads=True) == []


def test_nothing_is_kept_of_a_tail_that_is_dropped() -> None:
    def used() -> list[Any]:
        side = Side(MAKES["adamw"])
        tail = tail_of(side, clip_grad_norm=1.0)
        for n in range(3):
            side.set_grads(n)
            tail()
        return [*map(weakref.ref, (side.opt, side.params[0], tail))]

    dead = used()
    gc.collect()
    assert [x() for x in dead] == [None, None, None]
