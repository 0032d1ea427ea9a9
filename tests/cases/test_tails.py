"""Tails while a user changes what they work on, beside what trainers write."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import fuseopt
from tests.cases.trainer import SIZES, Change, Loop, beside


def limits(loop: Loop, turn: int) -> None:
    limits = [1.0, 1e-45, 3.4e38, 1e300, 1e-300, True, torch.tensor(0.7)]
    loop.set(clip_grad_norm=limits[turn])


def a_limit_that_comes_and_goes(loop: Loop, turn: int) -> None:
    loop.set(clip_grad_norm=[1.0, None, 0.5][turn % 3])


def kinds_of_norms(loop: Loop, turn: int) -> None:
    infinity = float("inf")
    loop.set(norm_type=[0.5, 3.0, 0.0, -1.0, -infinity, 2.5, infinity][turn])


def averages_for_an_evaluation(loop: Loop, turn: int) -> None:
    if turn == 3:
        with torch.no_grad():
            for p, average in zip(loop.params, loop.ema, strict=True):
                kept = p.clone()
                p.copy_(average)
                average.copy_(kept)


def memory_of_averages(loop: Loop, turn: int) -> None:
    if turn in (3, 4):
        for p, average in zip(loop.params, loop.ema, strict=True):
            p.data, average.data = average.data, p.data


def memory_of_parameters(loop: Loop, turn: int) -> None:
    if turn == 3:
        for p in loop.params[::3]:
            p.data = p.data * 0.5


def an_average_that_is_another(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.ema[2] = torch.zeros_like(loop.ema[2])


def state_that_is_lost(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.opt.state.clear()
    if turn == 5:
        loop.opt.state.pop(loop.params[2])


def state_that_is_loaded(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.opt.load_state_dict(copy.deepcopy(loop.opt.state_dict()))


def steps_in_between(loop: Loop, turn: int) -> None:
    if turn == 2:
        loop.opt.step()
    if turn == 4:
        type(loop.opt).step(loop.opt)


def a_hook_that_comes_late(loop: Loop, turn: int) -> None:
    if turn == 3:
        half = loop.params[0].grad
        loop.opt.register_step_pre_hook(lambda *_: half.mul_(0.5) and None)


def a_hook_that_raises(loop: Loop, turn: int) -> None:
    def hook(*_: Any) -> None:
        if turn == 3:
            raise RuntimeError("the hook")

    if turn == 3:
        loop.opt.register_step_pre_hook(hook)
    if turn == 4:
        loop.opt._optimizer_step_pre_hooks.clear()


def a_step_that_raises(loop: Loop, turn: int) -> None:
    beta: Any = "x" if turn == 3 else 0.999
    loop.opt.param_groups[0]["betas"] = (0.9, beta)


def gradients_in_one_tensor(loop: Loop, turn: int) -> None:
    if turn > 1:
        flat, place = torch.cat([p.grad.view(-1) for p in loop.params]), 0
        for p in loop.params:
            p.grad = flat[place : place + p.numel()].view_as(p)
            place += p.numel()


def gradients_of_other_strides(loop: Loop, turn: int) -> None:
    if turn > 2:
        loop.params[0].grad = loop.params[0].grad.t().contiguous().t()


def a_shared_gradient(loop: Loop, turn: int) -> None:
    if turn in (0, 3):
        loop.params[4].grad = loop.params[0].grad


def missing_gradients(loop: Loop, turn: int) -> None:
    for p in loop.params[turn::5]:
        p.grad = None


def all_gradients_missing(loop: Loop, turn: int) -> None:
    if turn in (2, 3):
        for p in loop.params:
            p.grad = None


def gradients_missing_at_first(loop: Loop, turn: int) -> None:
    if turn == 0:
        for p in loop.params:
            p.grad = None


def a_gradient_that_is_differentiated(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.params[1].grad.requires_grad_()


def a_frozen_parameter(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.params[2].requires_grad_(False)


def another_order(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.opt.param_groups[0]["params"].reverse()
        loop.ema.reverse()


def an_empty_group(loop: Loop, turn: int) -> None:
    if turn == 0:
        loop.opt.add_param_group({"params": []})
    if turn == 3:
        loop.opt.param_groups[1]["lr"] = 0.5


def options_of_the_group(loop: Loop, turn: int) -> None:
    changes: dict[int, dict[str, Any]] = {
        2: {"maximize": True},
        3: {"foreach": False},
        4: {"weight_decay": 0, "eps": 1e-3},
        5: {"lr": torch.tensor(0.02)},
    }
    loop.opt.param_groups[0].update(changes.get(turn, {}))


def gradients_of_stride_zero(loop: Loop, turn: int) -> None:
    if turn == 3:
        loop.params[1].grad = torch.full((), 0.3).expand(13)


def a_rate_that_moves(loop: Loop, turn: int) -> None:
    rates = [0.01, 0.0, 0.1, 1e-3, torch.tensor(0.02), torch.tensor(0.0), 1]
    loop.opt.param_groups[0]["lr"] = rates[turn]


def a_group_that_is_added(loop: Loop, turn: int) -> None:
    if turn == 3:
        new = torch.nn.Parameter(torch.ones(5))
        loop.opt.add_param_group({"params": [new], "lr": 0.3})
        loop.params.append(new)
        loop.ema.append(torch.zeros(5))
        new.grad = torch.ones(5)


def a_parameter_that_is_taken_away(loop: Loop, turn: int) -> None:
    if turn == 3:
        del loop.opt.param_groups[0]["params"][1], loop.ema[1]


def an_optimizer_compiled_before(loop: Loop, turn: int) -> None:
    if turn == 0 and loop.fused:
        loop.tail = None
        gc.collect()
        fuseopt.compile(loop.opt)
        loop.begin()


def an_optimizer_compiled_meanwhile(loop: Loop, turn: int) -> None:
    if turn == 2 and loop.fused:
        fuseopt.compile(loop.opt)
    if turn in (3, 5):
        loop.opt.step()


def a_step_of_the_backend_meanwhile(loop: Loop, turn: int) -> None:
    if turn == 0:
        step = loop.opt.step
        loop.kept = torch.compile(step, backend="fuseopt") if loop.fused else step
    if turn in (3, 5):
        loop.kept()


def a_second_tail_when_the_first_is_gone(loop: Loop, turn: int) -> None:
    if turn == 3 and loop.fused:
        loop.tail = None
        gc.collect()
        loop.begin()


def hooks_that_read(loop: Loop, turn: int) -> None:
    if turn == 0:
        seen = loop.seen = []
        first = loop.params[0]
        loop.opt.register_step_pre_hook(lambda *_: seen.append(first.grad.sum()))
        loop.opt.register_step_post_hook(lambda *_: seen.append(first.detach().sum()))


def a_hook_that_goes(loop: Loop, turn: int) -> None:
    if turn == 3:
        first = loop.params[0]
        hook = lambda *_: first.grad.mul_(0.5) and None  # noqa: E731
        loop.kept = loop.opt.register_step_pre_hook(hook)
    if turn == 5:
        loop.kept.remove()


def a_later_hook_that_raises(loop: Loop, turn: int) -> None:
    def hook(*_: Any) -> None:
        raise RuntimeError("the hook")

    if turn == 3:
        loop.kept = loop.opt.register_step_post_hook(hook)
    if turn == 4:
        loop.kept.remove()


def a_state_of_a_new_kind(loop: Loop, turn: int) -> None:
    if turn == 2:
        loop.opt.param_groups[0]["amsgrad"] = True
        for p in loop.params:
            loop.opt.state[p]["max_exp_avg_sq"] = torch.zeros_like(p)


def gradients_on_and_off(loop: Loop, turn: int) -> None:
    torch.set_grad_enabled(turn % 2 == 0)


CHANGES: list[Change] = [
    limits,
    a_limit_that_comes_and_goes,
    kinds_of_norms,
    averages_for_an_evaluation,
    memory_of_averages,
    memory_of_parameters,
    an_average_that_is_another,
    state_that_is_lost,
    state_that_is_loaded,
    steps_in_between,
    a_hook_that_comes_late,
    a_hook_that_raises,
    a_step_that_raises,
    gradients_in_one_tensor,
    gradients_of_other_strides,
    a_shared_gradient,
    missing_gradients,
    all_gradients_missing,
    gradients_missing_at_first,
    a_gradient_that_is_differentiated,
    a_frozen_parameter,
    another_order,
    an_empty_group,
    options_of_the_group,
    gradients_of_stride_zero,
    a_rate_that_moves,
    a_group_that_is_added,
    a_parameter_that_is_taken_away,
    an_optimizer_compiled_before,
    an_optimizer_compiled_meanwhile,
    a_step_of_the_backend_meanwhile,
    a_second_tail_when_the_first_is_gone,
    hooks_that_read,
    a_hook_that_goes,
    a_later_hook_that_raises,
    a_state_of_a_new_kind,
    gradients_on_and_off,
]


@pytest.mark.family(90)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_between_calls(change: Change, lanes: int) -> None:
    # of eager's clip, when it raises, some gradients are scaled
    beside(change, lanes, unwritten=change is gradients_of_stride_zero)


@pytest.mark.family(20)
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("kind", ["RAdam", "NAdam", "Adafactor", "ASGD", "Rprop"])
def test_an_optimizer_with_missing_gradients(kind: str, lanes: int) -> None:
    make = getattr(torch.optim, kind)
    beside(missing_gradients, lanes, lambda params: make(params, lr=0.01))
