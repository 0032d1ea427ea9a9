"""What stands around a step runs as ever: hooks, schedulers, profilers, wrappers."""

from __future__ import annotations

from typing import Any

import torch

import fuseopt
from tests.tails.test_tail import MAKES
from tests.tails.twins import Side, call, differences, tail_of


def test_hooks_see_what_they_see_in_eager() -> None:
    """Between the clip and the step, and between the step and the averages."""
    seen: list[list[torch.Tensor]] = []

    def before(opt: Any, args: Any, kwargs: Any) -> None:
        seen.append([p.grad.clone() for g in opt.param_groups for p in g["params"]])

    def after(opt: Any, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            for g in opt.param_groups:
                for p in g["params"]:
                    p.mul_(0.5)

    one, other = Side(MAKES["adamw"]), Side(MAKES["adamw"])
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(6):
        if n == 2:
            hooks = [
                hook
                for side in (one, other)
                for hook in (
                    side.opt.register_step_pre_hook(before),
                    side.opt.register_step_post_hook(after),
                )
            ]
        if n == 4:
            for hook in hooks:
                hook.remove()
        one.set_grads(n)
        other.set_grads(n)
        one.eager(1.0, 0.9)
        call(other, tail)
        assert differences(one, other, grads=True) == []
    assert len(seen) == 4
    assert all(map(torch.equal, seen[0], seen[1]))


def test_schedulers_and_profilers() -> None:
    side = Side(MAKES["sgd"])
    schedule = torch.optim.lr_scheduler.ExponentialLR(side.opt, 0.5)
    tail = tail_of(side)
    for n in range(4):
        side.set_grads(n)
        tail()
        schedule.step()  # which would warn if it came first
    assert side.opt.param_groups[0]["lr"] == 0.1 * 0.5**4
    with torch.profiler.profile() as profile:
        side.set_grads(0)
        tail()
    names = [event.name for event in profile.events()]
    assert "Optimizer.step#SGD.step" in names


def test_a_wrapped_step_is_called() -> None:
    """Somebody counts the calls of a step: that runs as ever."""
    one, other = Side(MAKES["sgd"]), Side(MAKES["sgd"])
    calls: list[int] = []
    plain = other.opt.step

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    other.opt.step = counting  # type: ignore[method-assign]
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0)
    for n in range(3):
        one.set_grads(n)
        other.set_grads(n)
        one.eager(1.0)
        call(other, tail)
    assert len(calls) == 3
    assert differences(one, other, grads=True) == []
