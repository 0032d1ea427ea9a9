"""Programs that do more than clip and step, with clips that are left to the step: the
bits of eager.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.session import COMPILED, session
from tests.tails.test_deferred import clip, momentum, pair, step_both
from tests.tails.twins import SHAPES, Side, differences, same

Clip = Callable[..., Any]
Program = Callable[[Side, Clip, bool], Any]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


@program
def clips_of_parts(side: Side, clip: Clip, compiled: bool) -> None:
    clip(side.params[:2])
    clip(side.params[2:])
    side.opt.step()


@program
def a_clip_of_each(side: Side, clip: Clip, compiled: bool) -> None:
    for p in side.params:
        clip([p])
    side.opt.step()


@program
def a_step_that_is_repeated(side: Side, clip: Clip, compiled: bool) -> None:
    clip(side.params)
    side.opt.step()
    side.opt.step()


@program
def a_clip_of_what_was_stepped(side: Side, clip: Clip, compiled: bool) -> Any:
    clip(side.params)
    side.opt.step()
    norm = clip(side.params, 0.1)
    side.opt.step()
    return norm


@program
def zeros_after_the_step(side: Side, clip: Clip, compiled: bool) -> None:
    for n in range(3):
        clip(side.params)
        side.opt.step()
        side.opt.zero_grad(set_to_none=False)
        for p in side.params:
            assert p.grad is not None
            p.grad.add_(n + 1.0)


@program
def a_clip_in_the_closure(side: Side, clip: Clip, compiled: bool) -> None:
    def closure() -> torch.Tensor:
        side.set_grads(9)
        clip(side.params)
        return torch.zeros(())

    side.opt.step(closure)


@program
def gradients_that_come_back(side: Side, clip: Clip, compiled: bool) -> None:
    clip(side.params)
    grads = [p.grad for p in side.params]
    side.set_grads(11)
    clip(side.params)
    side.opt.step()
    for p, g in zip(side.params, grads, strict=True):
        p.grad = g
    side.opt.step()


@program
def one_parameter_twice_in_the_next_clip(
    side: Side, clip: Clip, compiled: bool
) -> None:
    clip(side.params)
    clip([side.params[0], side.params[0]])
    side.opt.step()


@program
def another_tensor_of_the_same_gradient(side: Side, clip: Clip, compiled: bool) -> None:
    """What shares memory is scaled twice."""
    grad = side.params[4].grad
    assert grad is not None
    side.params[1].grad = grad[:13]
    clip(side.params)
    side.opt.step()


@program
def a_tail_that_is_made(side: Side, clip: Clip, compiled: bool) -> None:
    clip(side.params)
    if compiled:
        fuseopt.tail(side.opt)()
    else:
        side.opt.step()


@program
def an_optimizer_that_is_made(side: Side, clip: Clip, compiled: bool) -> None:
    clip(side.params)
    side.opt = momentum(side.params)
    if compiled:
        fuseopt.compile(side.opt)
    side.opt.step()


@pytest.fixture(scope="module")
def sides() -> tuple[Side, Side]:
    return pair(momentum, SHAPES)


@pytest.mark.family(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, sides: tuple[Side, Side]) -> None:
    """None of them loses a clip, or clips twice."""
    for seed in range(2):
        results = []
        for side in sides:
            compiled = side is sides[1]
            kind: Clip = torch.nn.utils.clip_grad_norm_
            if compiled:

                def kind(params: Any, max_norm: float) -> Any:
                    return fuseopt.clip_grad_norm_(params, max_norm, defer="unsafe")

            def clip(params: Any, max_norm: float = 0.5, kind: Clip = kind) -> Any:
                return kind(params, max_norm)

            side.set_grads(seed)
            results.append(PROGRAMS[name](side, clip, compiled))
        assert same(*results)
        assert not differences(*sides)


class Late(torch.optim.SGD):
    """Its closure is not called first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(1.0)
        loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
        return loss


def test_a_clip_in_a_closure_that_is_called_late() -> None:
    one, other = pair(lambda params: Late(params, lr=0.1), SHAPES)
    for n in range(3):

        def closure(side: Side, kind: Clip, n: int = n) -> Any:
            side.set_grads(n)
            return kind(side.params, 0.5)

        one.opt.step(lambda: closure(one, torch.nn.utils.clip_grad_norm_))
        other.opt.step(lambda: closure(other, lambda params, limit: clip(other, limit)))
        assert not differences(one, other)


def test_a_step_that_was_compiled_before() -> None:
    """It is compiled apart, and does the clip as well."""
    one, other = Side(momentum), Side(momentum)
    step: Any = torch.compile(other.opt.step, backend="fuseopt")
    fuseopt.compile(other.opt)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        torch.nn.utils.clip_grad_norm_(one.params, 0.5)
        one.opt.step()
        clip(other, 0.5)
        step()
        assert not differences(one, other)


def test_gradients_that_are_views_of_one_tensor() -> None:
    """What one optimizer scales in memory was not written by others."""

    def both(params: list[Any]) -> list[Optimizer]:
        return [momentum(params[:3]), momentum(params[3:])]

    sides = [Side(momentum), Side(momentum)]
    opts = [both(side.params) for side in sides]
    for opt in opts[1]:
        fuseopt.compile(opt)
    for n in range(3):
        for side, steps in zip(sides, opts, strict=True):
            side.set_grads(n)
            flat = torch.cat([p.grad.reshape(-1) for p in side.params])  # type: ignore
            pieces = flat.split([p.numel() for p in side.params])
            for p, piece in zip(side.params, pieces, strict=True):
                p.grad = piece.view(p.shape)
            if side is sides[0]:
                torch.nn.utils.clip_grad_norm_(side.params, 0.5)
            else:
                clip(side, 0.5)
            for opt in steps:
                opt.step()
        for p, q in zip(sides[0].params, sides[1].params, strict=True):
            assert same(p.detach(), q.detach())


def test_gradients_in_other_memory_raise() -> None:
    """No version counts `p.grad.data = x`."""
    _, other = pair(momentum, SHAPES)
    other.set_grads(0)
    clip(other)
    for p in other.params:
        assert p.grad is not None
        p.grad.data = torch.ones(p.shape)
    before = [p.detach().clone() for p in other.params]
    with pytest.raises(RuntimeError, match=r"were written between .* and the step"):
        other.opt.step()
    assert all(map(same, before, (p.detach() for p in other.params)))


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with dup")
def test_a_parameter_that_is_twice_in_a_group() -> None:
    """Its gradient is scaled once."""
    one, other = pair(
        lambda params: torch.optim.SGD([*params, params[0]], lr=0.1), SHAPES
    )
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        step_both(one, other, 0.5)


def test_a_first_clip_in_inference_mode() -> None:
    """What is kept of it serves later clips outside."""
    one, other = pair(momentum, SHAPES)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        torch.nn.utils.clip_grad_norm_(one.params, 0.5)
        one.opt.step()
        with torch.inference_mode(n == 0):
            clip(other, 0.5)
        other.opt.step()
        assert not differences(one, other)


def test_other_options() -> None:
    """The next step has them."""
    _, other = pair(momentum)
    for n in range(3):
        other.set_grads(n)
        clip(other)
        other.opt.step()
    before = getattr(other.opt.step, COMPILED).clipped
    assert before.single_graph.repeats
    fuseopt.compile(other.opt, check=False, fallback="error")
    other.set_grads(3)
    clip(other)
    other.opt.step()
    after = getattr(other.opt.step, COMPILED).clipped
    assert after is not before
    assert after._config.fallback == "error"


def test_gradients_are_not_kept() -> None:
    """Of a step that was skipped, or is done, nothing occupies memory."""
    _, other = pair(momentum, SHAPES)
    other.set_grads(0)
    clip(other)
    left = session.deferred.clips[-1]
    assert len([*left.alive()]) == len(other.params)
    other.opt.zero_grad()
    assert not [*left.alive()]
