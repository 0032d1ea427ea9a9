"""Between a clip that is left to the step and the step: what a user does meanwhile."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from tests.cases.trainer import SIZES
from tests.tails.twins import same

SHAPES = [(7, 5), (13,), (3, 2)] * 12


class Loop:
    """A training loop that clips and steps; `fused` leaves the clip to the step."""

    def __init__(self, fused: bool, lanes: int, way: str = "compile") -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = SHAPES[:lanes]
        self.fused = fused
        self.params: list[Any] = [
            torch.nn.Parameter(torch.randn(s, generator=draw)) for s in shapes
        ]
        self.opt: Any = torch.optim.AdamW(self.params, lr=0.01)
        self.beside: Any = torch.nn.Parameter(torch.ones(3))
        #: what a program keeps
        self.kept: Any = None
        self.way = way
        self.compile(self.opt)

    def compile(self, opt: Any) -> Any:
        if self.fused and self.way == "compile":
            fuseopt.compile(opt, eager_if_faster=False)
        elif self.fused:
            opt.step = torch.compile(opt.step, backend="fuseopt")
        return opt

    def clip(self, params: Any, limit: float = 1.0, **options: Any) -> Any:
        if self.fused:
            return fuseopt.clip_grad_norm_(params, limit, defer="unsafe", **options)
        return torch.nn.utils.clip_grad_norm_(params, limit, **options)

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


def nothing_between(loop: Loop, turn: int) -> Any:
    norm = loop.clip(loop.params)
    loop.opt.step()
    loop.opt.zero_grad()
    return norm


def clipped_twice(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    norm = loop.clip(loop.params, 0.5)
    loop.opt.step()
    return norm


def clips_of_every_second(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params[::2])
    loop.clip(loop.params[1::2], 0.3)
    loop.opt.step()


def a_clip_after_the_step(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    loop.opt.step()
    norm = loop.clip(loop.params, 0.25)
    loop.opt.step()
    return norm


def a_step_that_runs_twice(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    loop.opt.step()
    loop.opt.step()


def gradients_that_are_others(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    for p in loop.params[::3]:
        p.grad = torch.ones_like(p)
    loop.opt.step()


def all_gradients_made_anew(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    loop.opt.zero_grad()
    loop.set_grads(50 + turn)
    loop.opt.step()


def a_second_optimizer_of_them(loop: Loop, turn: int) -> Any:
    if turn == 0:
        loop.kept = loop.compile(torch.optim.SGD(loop.params, lr=0.1))
    loop.clip(loop.params)
    loop.kept.step()
    loop.opt.step()


def a_second_model(loop: Loop, turn: int) -> Any:
    if turn == 0:
        others = [torch.nn.Parameter(torch.ones_like(p)) for p in loop.params]
        loop.kept = loop.compile(torch.optim.AdamW(others, lr=0.01))
    others = loop.kept.param_groups[0]["params"]
    for p, q in zip(loop.params, others, strict=True):
        q.grad = p.grad * 2
    loop.clip([*loop.params, *others])
    loop.opt.step()
    loop.kept.step()
    return torch.cat([p.detach().view(-1) for p in others])


def a_limit_above_the_norm(loop: Loop, turn: int) -> Any:
    norm = loop.clip(loop.params, 1e9)
    loop.opt.step()
    return norm


def a_norm_that_is_not_a_number(loop: Loop, turn: int) -> Any:
    if turn == 2:
        loop.params[1].grad.fill_(float("nan"))
    norm = loop.clip(loop.params)
    loop.opt.step()
    return norm


def an_infinity_that_raises(loop: Loop, turn: int) -> Any:
    if turn == 2:
        loop.params[1].grad.fill_(float("inf"))
    with contextlib.suppress(RuntimeError):
        loop.clip(loop.params, error_if_nonfinite=True)
        loop.opt.step()


def gradients_missing_at_the_clip(loop: Loop, turn: int) -> Any:
    for p in loop.params[turn::4]:
        p.grad = None
    loop.clip(loop.params)
    loop.opt.step()


def a_step_with_a_closure(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    loop.opt.step(lambda: torch.zeros(()))


def a_step_that_raises(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    group = loop.opt.param_groups[0]
    if turn == 2:
        betas, group["betas"] = group["betas"], (0.9, "x")
        with contextlib.suppress(Exception):
            loop.opt.step()
        group["betas"] = betas
    else:
        loop.opt.step()


def parameters_read_between(loop: Loop, turn: int) -> Any:
    loop.clip(loop.params)
    loop.opt.step()
    return torch.nn.utils.get_total_norm(loop.params)


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
    nothing_between,
    clipped_twice,
    clips_of_every_second,
    a_clip_after_the_step,
    a_step_that_runs_twice,
    gradients_that_are_others,
    all_gradients_made_anew,
    a_second_optimizer_of_them,
    a_second_model,
    a_limit_above_the_norm,
    a_norm_that_is_not_a_number,
    an_infinity_that_raises,
    gradients_missing_at_the_clip,
    a_step_with_a_closure,
    a_step_that_raises,
    parameters_read_between,
]


@pytest.mark.family(20)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("way", ["compile", "backend"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_a_clip_that_is_left_to_the_step(
    program: Program, way: str, lanes: int
) -> None:
    """A step of the backend leaves nothing: its gradients are clipped at once."""
    torch._dynamo.reset()
    loops = Loop(False, lanes), Loop(True, lanes, way)
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


def halved(loop: Loop) -> None:
    loop.params[2].grad.mul_(0.5)


def zeroed(loop: Loop) -> None:
    loop.opt.zero_grad(set_to_none=False)


def in_other_memory(loop: Loop) -> None:
    loop.params[2].grad.data = torch.ones_like(loop.params[2])


@pytest.mark.family(6)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lanes", SIZES)
@pytest.mark.parametrize("write", [halved, zeroed, in_other_memory])
def test_gradients_that_are_written_between(
    write: Callable[[Loop], None], lanes: int
) -> None:
    """The step raises before it writes anything."""
    loop = Loop(True, lanes)
    for turn in range(3):
        loop.set_grads(turn)
        loop.clip(loop.params)
        if turn < 2:
            loop.opt.step()
    write(loop)
    before = [p.detach().clone() for p in loop.params]
    with pytest.raises(RuntimeError, match="gradients were written between"):
        loop.opt.step()
    assert all(map(torch.equal, before, loop.params))
