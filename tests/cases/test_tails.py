"""Tails while a user changes what they work on, beside what trainers write."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.twins import same

SHAPES = [(7, 5), (13,), (3, 2), (5,)] * 5
TURNS = 6


class Loop:
    """A training loop that ends in a tail (`fused`), or in what trainers write."""

    def __init__(self, fused: bool, make: Callable[[Any], Any]) -> None:
        draw = torch.Generator().manual_seed(0)
        self.fused = fused
        self.params: list[Any] = [
            torch.nn.Parameter(torch.randn(s, generator=draw)) for s in SHAPES
        ]
        self.opt = make(self.params)
        self.ema = [p.detach().clone() for p in self.params]
        self.limit: Any = 1.0
        self.kind: Any = 2.0
        self.tail: Any = None
        if fused:
            averages = [(self.ema, 0.9)]
            options = {"clip_grad_norm": 1.0, "eager_if_faster": False}
            self.tail = fuseopt.tail(self.opt, ema=averages, **options)

    def set_grads(self, turn: int) -> None:
        draw = torch.Generator().manual_seed(100 + turn)
        for p in self.params:
            p.grad = torch.randn(p.shape, generator=draw) * 3

    def clip(self, limit: Any, kind: Any = 2.0) -> None:
        self.limit, self.kind = limit, kind
        if self.fused:
            self.tail.clip_grad_norm, self.tail.norm_type = limit, kind

    def end(self) -> Any:
        if self.fused:
            return self.tail().norm
        norm = None
        if self.limit is not None:
            params = self.opt.param_groups[0]["params"]
            norm = torch.nn.utils.clip_grad_norm_(params, self.limit, self.kind)
        self.opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.opt.param_groups[0]["params"], 0.1)
        return norm

    def held(self) -> list[Any]:
        state = [x for p in self.params for x in self.opt.state.get(p, {}).values()]
        grads = [p.grad for p in self.params]
        return [*self.params, *self.ema, *grads, *state, len(self.opt.state)]


Change = Callable[[Loop, int], None]


def limits(loop: Loop, turn: int) -> None:
    loop.clip([1.0, 1e-45, 3.4e38, 1e300, 1e-300, True][turn])


def a_limit_that_comes_and_goes(loop: Loop, turn: int) -> None:
    loop.clip([1.0, None, 0.5][turn % 3])


def kinds_of_norms(loop: Loop, turn: int) -> None:
    loop.clip(1.0, [0.5, 3.0, 0.0, -1.0, float("-inf"), 2.5][turn])


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
]


def beside(change: Change, make: Callable[[Any], Any]) -> None:
    """Both loops, compared after each turn; an error is to come in both."""
    loops = Loop(False, make), Loop(True, make)
    for turn in range(TURNS):
        raised = []
        for loop in loops:
            loop.set_grads(turn)
            change(loop, turn)
            try:
                raised.append((loop.end(), None))
            except Exception as error:
                raised.append((None, type(error)))
        (norm, error), (fused_norm, fused_error) = raised
        assert fused_error is error, turn
        assert norm is None or same(norm, fused_norm), turn
        eager, fused = (loop.held() for loop in loops)
        unlike = [
            k
            for k, pair in enumerate(zip(eager, fused, strict=True))
            if pair != (None, None) and not same(*pair)
        ]
        assert not unlike, (turn, unlike)


@pytest.mark.family(24)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_change_between_calls(change: Change) -> None:
    beside(change, lambda params: torch.optim.AdamW(params, lr=0.01))


@pytest.mark.family(5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["RAdam", "NAdam", "Adafactor", "ASGD", "Rprop"])
def test_an_optimizer_with_missing_gradients(kind: str) -> None:
    make = getattr(torch.optim, kind)
    beside(missing_gradients, lambda params: make(params, lr=0.01))
