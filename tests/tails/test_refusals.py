"""What a tail refuses, before anything is written."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.errors import (
    CaptureError,
    FuseoptError,
    NotAnOptimizer,
    UnsupportedInput,
)
from tests.tails.test_tail import MAKES
from tests.tails.twins import Side, tail_of


@pytest.mark.parametrize("limit", [0, 0.0, -1.0, float("nan")])
def test_limits_that_are_none(limit: float) -> None:
    side = Side(MAKES["sgd"])
    with pytest.raises(ValueError, match="it must be above zero"):
        tail_of(side, clip_grad_norm=limit)
    tail = tail_of(side, clip_grad_norm=1.0)
    tail.clip_grad_norm = limit
    side.set_grads(0)
    before = [p.detach().clone() for p in side.params]
    with pytest.raises(ValueError, match="above zero"):
        tail()
    assert all(map(torch.equal, before, side.params))
    tail.clip_grad_norm, tail.clip_grad_value = None, limit
    with pytest.raises(ValueError, match="clip_grad_value"):
        tail()


def test_averages_that_cannot_be() -> None:
    side = Side(MAKES["sgd"])
    params, ema = side.params, side.ema
    wrong: list[tuple[Any, str]] = [
        ((ema[:-1], 0.9), "5 tensors, and there are 6"),
        (([*ema[:-1], torch.zeros(3)], 0.9), r"shape is \[3\]"),
        (([*ema[:-1], params[-1].detach()], 0.9), "shares memory"),
        (([*ema[:-1], torch.zeros(1, 1, dtype=torch.int32)], 0.9), "holds no averages"),
        (([*ema[:-1], torch.zeros(1, 1, device="meta")], 0.9), "on meta"),
        ((ema, 1.5), "between 0 and 1"),
        ((ema, float("nan")), "between 0 and 1"),
    ]
    for entry, message in wrong:
        with pytest.raises(ValueError, match=message):
            tail_of(side, ema=[entry])
    with pytest.raises(TypeError, match="pairs"):
        tail_of(side, ema=[0.9])


def test_scalers_that_cannot_be() -> None:
    side = Side(MAKES["sgd"])
    with pytest.raises(TypeError, match="is a object, not"):
        fuseopt.tail(side.opt, scaler=object())  # type: ignore[arg-type]

    class Sharded(torch.amp.GradScaler):
        def unscale_(self, optimizer: Optimizer) -> None:
            raise AssertionError

    with pytest.raises(TypeError, match="overrides how a GradScaler"):
        fuseopt.tail(side.opt, scaler=Sharded("cpu"))
    unused = torch.amp.GradScaler("cpu")
    tail = fuseopt.tail(side.opt, scaler=unused)
    side.set_grads(0)
    with pytest.raises(AssertionError, match="_scale is None"):
        tail()


def test_a_fallback_that_is_an_error_is_one_at_each_call() -> None:
    """The first call raised, and those after it ran in pieces."""
    side = Side(MAKES["sgd"])
    tail = tail_of(side, clip_grad_norm=1.0)
    side.set_grads(0)
    tail()
    side.opt.register_step_post_hook(lambda *_: None)
    before = [p.detach().clone() for p in side.params]
    for n in range(3):
        side.set_grads(n)
        with pytest.raises(CaptureError, match="hooks run"):
            tail()
    assert all(map(torch.equal, before, side.params))


def test_all_gradients_are_none() -> None:
    side = Side(MAKES["sgd"], scaled=True)
    tail = tail_of(side, clip_grad_norm=1.0)
    with pytest.raises(UnsupportedInput, match="all gradients of SGD are None"):
        tail()
    plain = Side(MAKES["sgd"])
    out = fuseopt.tail(plain.opt, clip_grad_norm=1.0)()
    assert float(out.norm) == 0.0  # type: ignore[arg-type]


def test_two_calls_without_an_update() -> None:
    side = Side(MAKES["sgd"], scaled=True)
    tail = tail_of(side)
    side.set_grads(0)
    tail()
    with pytest.raises(RuntimeError, match="since the last update"):
        tail()


def test_what_is_no_optimizer() -> None:
    for wrong in (3, [], [3]):
        with pytest.raises(NotAnOptimizer):
            fuseopt.tail(wrong)  # type: ignore[arg-type]
    side = Side(MAKES["sgd"])
    with pytest.raises(ValueError, match="twice"):
        fuseopt.tail([side.opt, side.opt])


def test_two_tails_on_one_optimizer() -> None:
    side = Side(MAKES["sgd"])
    first = tail_of(side)
    with pytest.raises(FuseoptError, match="already has a tail"):
        tail_of(side)
    del first
    gc.collect()
    tail_of(side)


def test_a_tail_within_torch_compile() -> None:
    side = Side(MAKES["sgd"])
    tail = tail_of(side)
    side.set_grads(0)
    before = [p.detach().clone() for p in side.params]
    with pytest.raises(Exception, match="call it outside"):
        torch.compile(lambda: tail(), backend="eager", fullgraph=True)()
    assert all(map(torch.equal, before, side.params))
