"""`fuseopt.clip_grad_norm_(defer="unsafe")`: the step's kernel scales the gradients."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.compiler.session import session
from tests.papers.momentum import Lion
from tests.tails.twins import SHAPES, Side, differences, same

MANY = SHAPES * 4


def adamw(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


MAKERS: dict[str, Any] = {
    "adamw": adamw,
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "rprop": lambda params: torch.optim.Rprop(params),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
    "lion": lambda params: Lion(params, lr=1e-3),
    "groups": lambda params: torch.optim.AdamW(
        [{"params": params[::2]}, {"params": params[1::2], "lr": 3e-3}]
    ),
}


def pair(make: Any = adamw, shapes: Any = MANY, **kind: Any) -> tuple[Side, Side]:
    """Two sides alike, the second one's optimizer compiled."""
    one, other = Side(make, shapes, **kind), Side(make, shapes, **kind)
    fuseopt.compile(other.opt, check=True)
    return one, other


def clip(side: Side, max_norm: float = 1.0, *args: Any, **kwargs: Any) -> Any:
    return fuseopt.clip_grad_norm_(
        side.params, max_norm, *args, **kwargs, defer="unsafe"
    )


def step_both(one: Side, other: Side, *args: Any, **kwargs: Any) -> None:
    """A clip and a step of each."""
    expected = torch.nn.utils.clip_grad_norm_(one.params, *args, **kwargs)
    one.opt.step()
    assert same(clip(other, *args, **kwargs), expected)
    other.opt.step()
    assert not differences(one, other)


def _cases() -> list[Any]:
    """Optimizers, lanes and dtypes; a few of them are quick."""
    quick = {("adamw", 24, torch.float32), ("lion", 6, torch.bfloat16)}
    return [
        pytest.param(*case, marks=[] if case in quick else pytest.mark.slow)
        for name in MAKERS
        for n in (6, 24)
        for dtype in (torch.float32, torch.bfloat16)
        for case in [(name, n, dtype)]
    ]


@pytest.mark.family(30)
@pytest.mark.parametrize(("name", "lanes", "dtype"), _cases())
def test_bits_of_eager(name: str, lanes: int, dtype: torch.dtype) -> None:
    shapes = SHAPES * (lanes // len(SHAPES))
    one, other = pair(MAKERS[name], shapes, dtype=dtype)
    for n in range(5):
        for side in (one, other):
            side.set_grads(n)
            if n >= 3:
                side.params[n].grad = None
        step_both(one, other, 0.5 + n)
        if n:
            side = Side(MAKERS[name], shapes, dtype=dtype)
            side.set_grads(n)
            if n >= 3:
                side.params[n].grad = None
            # the step has read gradients, and has not written them
            for p, q in zip(side.params, other.params, strict=True):
                assert p.grad is q.grad is None or same(p.grad, q.grad)
    assert not [r.fallback for r in fuseopt.reports() if r.fallback]


@pytest.mark.slow
def test_a_launch_for_the_norm_and_one_for_the_step() -> None:
    one, other = pair()
    for n in range(4):
        for side in (one, other):
            side.set_grads(n)
        step_both(one, other, 1.0)
    assert [r.launches for r in fuseopt.reports()] == [1, 1, 1]
    # gradients are read twice, and never written; the parameter and its moments are
    # read and written
    elements = sum(p.numel() for p in other.params)
    assert fuseopt.reports()[-1].bytes == 28 * elements


def waiting(params: list[Any]) -> list[int]:
    """The gradients of clips that no step has done yet, among those of `params`: other
    tests may have left some that the garbage collector has not come to.
    """
    clips = session.deferred.clips if session.deferred else []
    grads = {id(p.grad) for p in params}
    return [
        k
        for c in clips
        for k, (gradient, *_) in c.left.items()
        if gradient() is not None and k in grads and k not in c.stepped
    ]


def momentum(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def ready() -> tuple[Side, Side]:
    """Two sides whose state is there, with new gradients."""
    one, other = pair(momentum)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        if n < 2:
            step_both(one, other, 1.0)
    return one, other


def test_gradients_that_were_written_raise() -> None:
    """Before anything else is; and so does the next clip."""
    _, other = ready()
    clip(other)
    before = [p.detach().clone() for p in other.params]
    grad = other.params[3].grad
    assert grad is not None
    grad.add_(1.0)
    with pytest.raises(RuntimeError, match=r"were written between .* and the step"):
        other.opt.step()
    with pytest.raises(RuntimeError, match=r"were written between .* the next clip"):
        clip(other)
    assert all(map(same, before, (p.detach() for p in other.params)))
    for p in other.params:
        p.grad = None
    other.opt.step()  # nothing waits any longer
    assert all(map(same, before, (p.detach() for p in other.params)))


@pytest.mark.slow
def test_gradients_that_are_others_are_not_clipped() -> None:
    one, other = ready()
    torch.nn.utils.clip_grad_norm_(one.params, 0.5)
    clip(other, 0.5)
    for side in (one, other):
        side.params[0].grad = torch.full_like(side.params[0], 3.0)
        side.params[1].grad = None
    one.opt.step()
    other.opt.step()
    assert not differences(one, other, grads=True)


def test_a_step_that_is_left_out() -> None:
    """The next gradients are clipped as if nothing had been; twice is twice."""
    one, other = ready()
    torch.nn.utils.clip_grad_norm_(one.params, 0.5)
    clip(other, 0.5)
    for side in (one, other):
        side.opt.zero_grad()
        side.set_grads(7)
    step_both(one, other, 1.0)
    for side in (one, other):
        side.set_grads(8)
    torch.nn.utils.clip_grad_norm_(one.params, 0.5)
    clip(other, 0.5)
    step_both(one, other, 0.25)
    assert not waiting(other.params)


def test_what_a_plain_clip_finds() -> None:
    """A clip that defers nothing clips what waits first."""
    one, other = ready()
    for side in (one, other):
        torch.nn.utils.clip_grad_norm_(one.params, 0.5) if side is one else clip(
            side, 0.5
        )
        fuseopt.clip_grad_norm_(side.params[:5], 0.1)
        side.opt.step()
    assert not differences(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_arguments_of_the_clip(norm_type: float, foreach: bool | None) -> None:
    one, other = pair(momentum)
    for n, max_norm in enumerate([1.0, 0.0, -1.0, float("inf"), float("nan")]):
        for side in (one, other):
            side.set_grads(n)
        step_both(one, other, max_norm, norm_type, foreach=foreach)


def test_norms_that_are_not_finite() -> None:
    one, other = ready()
    for side in (one, other):
        side.set_grads(4, bad=True)
    before = [p.detach().clone() for p in other.params]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip(other, 1.0, error_if_nonfinite=True)
    for side in (one, other):
        side.opt.step()  # as eager's, of gradients that were not clipped
    assert not differences(one, other, grads=True)
    assert not all(map(same, before, (p.detach() for p in other.params)))
    for side in (one, other):
        side.set_grads(5)
    step_both(one, other, 1.0, error_if_nonfinite=True)


def test_other_ways_to_defer_raise() -> None:
    with pytest.raises(ValueError, match="defer is 'always'"):
        fuseopt.clip_grad_norm_([], 1.0, defer="always")


def test_gradient_scaler() -> None:
    """A step that is skipped leaves what was clipped alone."""
    one, other = pair(momentum, scaled=True)
    for n in range(8):
        for side in (one, other):
            side.set_grads(n, bad=n in (2, 3, 6))
        one.eager(1.0, keep=False)
        other.scaler.unscale_(other.opt)
        clip(other)
        other.scaler.step(other.opt)
        other.scaler.update()
        other.opt.zero_grad()
        assert not differences(one, other)


def _refused(side: Side) -> str:
    """Why a clip is not left to the step, which then finds it done."""
    before = [r.fallback for r in fuseopt.reports()]
    clip(side, 0.5)
    (why,) = [r.fallback for r in fuseopt.reports() if r.fallback not in before]
    assert not waiting(side.params)
    return why


@pytest.mark.slow
def test_optimizers_that_cannot_do_it() -> None:
    """Gradients are clipped at once, and a Report says why."""
    one, other = ready()
    torch.nn.utils.clip_grad_norm_(one.params, 0.5)
    extra = torch.nn.Parameter(torch.randn(3))
    hook = other.opt.register_step_pre_hook(lambda *_: None)
    assert "hooks of SGD may read gradients" in _refused(other)
    hook.remove()
    assert all(map(same, (p.grad for p in one.params), (p.grad for p in other.params)))
    other.params.append(extra)
    extra.grad = torch.ones(3)
    assert "no optimizer that fuseopt.compile was given" in _refused(other)
    other.params.pop()
    second = fuseopt.compile(torch.optim.SGD(other.params[:2], lr=0.1))
    assert "in two optimizers" in _refused(other)
    del second
    gc.collect()
    tail = fuseopt.tail(other.opt)
    assert "has a tail" in _refused(other)
    del tail
    other.opt.step = type(other.opt).step.__get__(other.opt)  # type: ignore[method-assign]
    assert "not the one that fuseopt.compile made" in _refused(other)


def test_several_optimizers() -> None:
    """A clip over both, each of which steps its own; one of them later."""

    def both(params: list[Any]) -> list[Optimizer]:
        return [momentum(params[:12]), adamw(params[12:])]

    sides = [Side(momentum, MANY) for _ in range(2)]
    opts = [both(side.params) for side in sides]
    for opt in opts[1]:
        fuseopt.compile(opt, check=True)
    for n in range(4):
        for side in sides:
            side.set_grads(n)
        torch.nn.utils.clip_grad_norm_(sides[0].params, 1.0)
        clip(sides[1])
        for one, other in zip(*opts, strict=True):
            one.step()
            other.step()
        for p, q in zip(sides[0].params, sides[1].params, strict=True):
            assert same(p.detach(), q.detach())
    assert not waiting(sides[1].params)


@pytest.mark.slow
def test_a_step_with_a_closure() -> None:
    """What waits is clipped in memory, before the closure makes other gradients."""
    one, other = ready()
    torch.nn.utils.clip_grad_norm_(one.params, 0.5)
    clip(other, 0.5)
    for side in (one, other):
        seen = []

        def closure(side: Side = side, seen: list[Any] = seen) -> torch.Tensor:
            seen.extend(p.grad.clone() for p in side.params if p.grad is not None)
            side.set_grads(11)
            return torch.zeros(())

        side.opt.step(closure)
        side.ema = seen
    assert not differences(one, other)


@pytest.mark.slow
def test_stances_and_modes() -> None:
    one, other = ready()
    for n, stance in enumerate(["default", "force_eager", "default"]):
        for side in (one, other):
            side.set_grads(20 + n)
        torch.nn.utils.clip_grad_norm_(one.params, 0.5)
        one.opt.step()
        clip(other, 0.5)
        with torch.compiler.set_stance(stance):
            other.opt.step()
        assert not differences(one, other)


class Returns(torch.optim.SGD):
    """Its step returns something."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return 7


@pytest.mark.slow
@pytest.mark.parametrize("shapes", [SHAPES, MANY], ids=["few", "many"])
def test_a_step_that_returns_something(shapes: Any) -> None:
    def make(params: Any) -> Optimizer:
        return Returns(params, lr=0.1, momentum=0.9)

    one, other = pair(make, shapes)
    for n in range(4):
        for side in (one, other):
            side.set_grads(n)
        torch.nn.utils.clip_grad_norm_(one.params, 1.0)
        clip(other)
        assert one.opt.step() == other.opt.step() == 7
        assert not differences(one, other)


@pytest.mark.slow
def test_an_optimizer_that_changes() -> None:
    """Groups that are added and states that are loaded between a clip and its step."""
    one, other = ready()
    for side in (one, other):
        extra = torch.nn.Parameter(torch.ones(3))
        extra.grad = torch.full((3,), 5.0)
        if side is one:
            torch.nn.utils.clip_grad_norm_(side.params, 0.5)
        else:
            clip(side, 0.5)
        side.opt.add_param_group({"params": [extra], "lr": 0.5})
        side.params.append(extra)
        side.ema.append(torch.zeros(()))
        side.opt.step()
    assert not differences(one, other, grads=True)
    for n in range(3):
        for side in (one, other):
            side.set_grads(n)
        torch.nn.utils.clip_grad_norm_(one.params, 0.5)
        clip(other, 0.5)
        for side in (one, other):
            side.opt.load_state_dict(side.opt.state_dict())
            side.opt.step()
        assert not differences(one, other)


@pytest.mark.slow
def test_nothing_is_left_of_one_that_is_dropped() -> None:
    def used() -> list[Any]:
        side = pair(momentum)[1]
        for n in range(4):
            side.set_grads(n)
            clip(side)
            if n < 3:
                side.opt.step()
        grads = [p.grad for p in side.params]
        return [*map(weakref.ref, [side.opt, *side.params, *grads])]

    dead = used()
    gc.collect()
    assert not [x for x in dead if x() is not None]
    side = Side(momentum, [(3,)])
    side.set_grads(0)
    _refused(side)
    assert session.deferred is None
