"""Between a clip that is left to the step and the step: what a user does meanwhile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.twins import same

SHAPES = [(7, 5), (13,), (3, 2)] * 12


class Loop:
    """A training loop that clips and steps; `fused` leaves the clip to the step."""

    def __init__(self, fused: bool, lanes: int) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = SHAPES[:lanes]
        self.fused = fused
        self.params: list[Any] = [
            torch.nn.Parameter(torch.randn(s, generator=draw)) for s in shapes
        ]
        self.opt: Any = torch.optim.AdamW(self.params, lr=0.01)
        self.beside: Any = torch.nn.Parameter(torch.ones(3))
        if fused:
            fuseopt.compile(self.opt, eager_if_faster=False)

    def clip(self, params: Any, limit: float = 1.0) -> Any:
        if self.fused:
            return fuseopt.clip_grad_norm_(params, limit, defer="unsafe")
        return torch.nn.utils.clip_grad_norm_(params, limit)

    def set_grads(self, turn: int) -> None:
        draw = torch.Generator().manual_seed(100 + turn)
        for p in (*self.params, self.beside):
            p.grad = torch.randn(p.shape, generator=draw) * 3


Program = Callable[[Loop, int], Any]


def a_norm_that_is_written(loop: Loop, turn: int) -> Any:
    norm = loop.clip(loop.params)
    norm.mul_(0)
    loop.opt.step()
    return norm


def some_of_the_parameters(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params[1:3])
    loop.opt.step()


def parameters_of_no_optimizer_too(loop: Loop, turn: int) -> Any:
    loop.clip([*loop.params, loop.beside])
    loop.opt.step()


def an_iterator_of_parameters(loop: Loop, turn: int) -> Any:
    loop.clip(iter(loop.params))
    loop.opt.step()


def a_hook_that_comes_late(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    if turn == 2:
        loop.opt.register_step_pre_hook(lambda *_: None)
    loop.opt.step()


def a_rate_that_moves(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    loop.opt.param_groups[0]["lr"] *= 0.5
    loop.opt.step()


def a_state_that_is_loaded(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    if turn == 2:
        loop.opt.load_state_dict(copy.deepcopy(loop.opt.state_dict()))
    loop.opt.step()


def another_order(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    if turn == 2:
        loop.opt.param_groups[0]["params"].reverse()
    loop.opt.step()


def other_memory_of_a_parameter(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    if turn == 2:
        loop.params[2].data = loop.params[2].data * 2
    loop.opt.step()


def a_group_that_is_added(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    if turn == 2:
        loop.opt.add_param_group({"params": [loop.beside]})
    loop.opt.step()


def gradients_that_are_gone(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    for p in loop.params[::3]:
        p.grad = None
    loop.opt.step()


def clips_of_two_halves_that_overlap(loop: Loop, turn: int) -> Any:
    half = len(loop.params) // 2
    loop.clip(loop.params[: half + 1])
    loop.clip(loop.params[half:], 0.3)
    loop.opt.step()


def no_step_at_odd_turns(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    if turn % 2 == 0:
        loop.opt.step()


PROGRAMS: list[Program] = [
    a_norm_that_is_written,
    some_of_the_parameters,
    parameters_of_no_optimizer_too,
    an_iterator_of_parameters,
    a_hook_that_comes_late,
    a_rate_that_moves,
    a_state_that_is_loaded,
    another_order,
    other_memory_of_a_parameter,
    a_group_that_is_added,
    gradients_that_are_gone,
    clips_of_two_halves_that_overlap,
    no_step_at_odd_turns,
]


@pytest.mark.family(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", [4, 6, 18, 34])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_clip_that_is_left_to_the_step(program: Program, lanes: int) -> None:
    loops = Loop(False, lanes), Loop(True, lanes)
    for turn in range(5):
        results = []
        for loop in loops:
            loop.set_grads(turn)
            results.append(program(loop, turn))
        if results[0] is not None:
            assert same(*results), turn
        for p, q in zip(*(loop.params for loop in loops), strict=True):
            assert same(p, q), turn
            states = [x.opt.state[y] for x, y in zip(loops, (p, q), strict=True)]
            for key in states[0] | states[1]:
                assert same(states[0][key], states[1][key]), (turn, key)
