"""A tail that is called as it was called before asks for little, and misses nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fuseopt
from fuseopt.errors import UnsupportedInput
from fuseopt.tails.tail import Tail
from tests.frames import entered
from tests.tails.test_tail import MAKES
from tests.tails.twins import Side, call, differences, same, tail_of

SHAPES = [(5, 3), (7,), (), (4, 4, 2)] * 8
#: What a call that was not asked for the same, or does not find the same, goes through.
LOOKS = {"_content", "parameters_of", "gradients_of", "gradients", "prepare", "of"}
Change = Callable[[Side], None]
#: Calls after which one call of C does the next one.
WARM = 9


def pair(name: str = "adamw", **more: Any) -> tuple[Side, Side]:
    one, other = (Side(MAKES[name], SHAPES, **more) for _ in range(2))
    return one, other


def named(function: Callable[[], object]) -> list[str]:
    return [code.co_name for code in entered(function)]


def is_steady(side: Side, tail: Tail) -> bool:
    """Does a call look for nothing? It is made."""
    looked = LOOKS.intersection(named(lambda: call(side, tail)))
    return not looked


@pytest.mark.family(6)
@pytest.mark.parametrize("zero_grad", [False, True, "zeros"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_steady_call_is_short(zero_grad: Any, scaled: bool) -> None:
    """However many lanes there are, and wherever gradients lie."""
    counts = []
    for n in (20, 40):
        side = Side(MAKES["adamw"], [(4, 3), (5,)] * (n // 2), scaled=scaled)
        tail = tail_of(side, clip_grad_norm=1.0, ema=[(side.ema, 0.9)])
        tail.zero_grad = zero_grad
        for seed in range(6):
            side.set_grads(seed)
            call(side, tail)
        for seed in range(2):
            side.set_grads(seed)
            counts.append(named(tail))
            if scaled:
                side.scaler.update()
    assert [LOOKS.intersection(names) for names in counts] == [set()] * 4
    assert len({*map(len, counts)}) == 1
    # of these the step alone enters 48
    assert len(counts[0]) < 48 + 30


def nothing(side: Side) -> None:
    """Change nothing."""


def other_memory(side: Side) -> None:
    for k in (2, 5):
        side.params[k].data = side.params[k].data.clone()


def average_elsewhere(side: Side) -> None:
    side.ema[3].data = side.ema[3].data.clone()


def no_gradient(side: Side) -> None:
    side.params[3].grad = None


def turned(side: Side) -> None:
    p = side.params[0]
    assert p.grad is not None
    p.grad = p.grad.t().contiguous().t()


def shared(side: Side) -> None:
    side.params[5].grad = side.params[1].grad


def overlapping(side: Side) -> None:
    """Two gradients, one memory."""
    grad = side.params[1].grad
    assert grad is not None
    side.params[5].grad = grad.view(7)


def partly(side: Side) -> None:
    """Of two gradients the last elements of one are the first ones of the other."""
    room = torch.arange(10.0)
    side.params[1].grad, side.params[5].grad = room[:7], room[3:]


def in_a_bucket(side: Side) -> None:
    grads: list[Any] = [p.grad for p in side.params]
    flat = torch.cat([g.reshape(-1) for g in grads])
    at = 0
    for p in side.params:
        p.grad = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()


def other_state(side: Side) -> None:
    own = side.opt.state[side.params[4]]
    own["exp_avg"] = own["exp_avg"].clone()


def other_rate(side: Side) -> None:
    side.opt.param_groups[0]["lr"] *= 0.5


def other_groups(side: Side) -> None:
    side.opt.load_state_dict(side.opt.state_dict())


def frozen(side: Side) -> None:
    side.params[6].requires_grad_(False)


CHANGES = [
    nothing,
    other_memory,
    average_elsewhere,
    no_gradient,
    turned,
    in_a_bucket,
    other_state,
    other_rate,
    other_groups,
    frozen,
]


@pytest.mark.family(20)
@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_changes_is_noticed(change: Change, zero_grad: bool) -> None:
    """In one call, with eager's bits; then calls are steady again."""
    one, other = pair()
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])

    def step(n: int, change: Change) -> None:
        for side in (one, other):
            side.set_grads(n)
            change(side)
        norm = one.eager(1.0, 0.9, keep=not zero_grad)
        tail.zero_grad = zero_grad
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []

    for n in range(WARM):
        step(n, nothing)
    step(WARM, change)
    for n in range(WARM + 1, WARM + 5):
        step(n, nothing)
    other.set_grads(WARM + 5)
    assert is_steady(other, tail)


@pytest.mark.family(12)
@pytest.mark.parametrize("zero_grad", [False, True])
@pytest.mark.parametrize("share", [shared, overlapping, partly])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_gradients_that_come_to_share_memory(
    share: Change, zero_grad: bool, name: str
) -> None:
    """Eager scales them twice, though nobody looks at them afterwards."""
    one, other = pair(name)
    tail = fuseopt.tail(
        other.opt, clip_grad_norm=1.0, ema=[(other.ema, 0.9)], zero_grad=zero_grad
    )
    for n in range(WARM + 4):
        for side in (one, other):
            side.set_grads(n)
            if n in (WARM, WARM + 1):
                share(side)
        norm = one.eager(1.0, 0.9, keep=not zero_grad)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []


def test_gradients_shared_from_the_first_call_on_that_are_dropped() -> None:
    """They were scaled once."""
    one, other = (Side(MAKES["sgd"], [(6,)] * 20) for _ in range(2))
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0, zero_grad=True)
    for n in range(4):
        for side in (one, other):
            side.set_grads(n)
            grad = side.params[2].grad
            assert grad is not None
            side.params[3].grad = grad.view(6)
        norm = one.eager(1.0, keep=False)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []


def test_what_is_asked_for_is_noticed() -> None:
    """Each attribute, in a call in between."""
    one, other = pair("sgd")
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    limit = torch.tensor(0.7)

    def step(n: int, *given: Any) -> None:
        for side in (one, other):
            side.set_grads(n)
        norm = one.eager(*given)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []

    for n in range(WARM):
        step(n, 1.0, 0.9)
    tail.clip_grad_norm = 2.0
    step(4, 2.0, 0.9)
    tail.clip_grad_value = 0.01
    step(5, 2.0, 0.9, 0.01)
    tail.decays[0] = 0.5
    step(6, 2.0, 0.5, 0.01)
    tail.norm_type = float("inf")
    step(7, 2.0, 0.5, 0.01, float("inf"))
    tail.clip_grad_norm = None
    step(8, None, 0.5, 0.01)
    tail.clip_grad_value = limit
    for n in range(9, 12):
        step(n, None, 0.5, float(limit))
        limit.mul_(0.5)  # what a tensor holds is no other tensor
    tail.clip_grad_value = -1.0
    with pytest.raises(ValueError, match="must be above zero"):
        tail()


class Live:
    """An object that is another number from time to time."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __float__(self) -> float:
        return self.value

    def set(self, value: float) -> None:
        self.value = value


class LiveArray(Live):
    """The same, of NumPy."""

    def __init__(self, value: float) -> None:
        self.array = np.array(value)

    def set(self, value: float) -> None:
        self.array[...] = value


@pytest.mark.family(3)
@pytest.mark.parametrize("kind", [Live, LiveArray])
@pytest.mark.parametrize("name", ["clip_grad_norm", "grad_divisor", "decays"])
def test_an_object_that_comes_to_be_another_number(name: str, kind: Any) -> None:
    """Calls that are asked for the same object went on with its old number."""
    one, other = pair("sgd")
    live = kind(1.0)
    number = getattr(live, "array", live)
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.5)])
    setattr(tail, name, [number] if name == "decays" else number)
    for n in range(WARM + 3):
        value = 1.0 if n < WARM else 0.25
        live.set(value)
        for side in (one, other):
            side.set_grads(n)
        if name == "grad_divisor":
            torch._foreach_div_([p.grad for p in one.params], value)
        norm = one.eager(
            value if name == "clip_grad_norm" else 1.0,
            value if name == "decays" else 0.5,
        )
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []


def test_a_tensor_that_gets_other_memory() -> None:
    """Of a limit with a dimension the tail has a view."""
    one, other = pair("sgd")
    limit = torch.tensor([1.0])
    tail = tail_of(other, clip_grad_norm=limit)
    for n in range(WARM + 2):
        if n == WARM:
            limit.data = torch.tensor([0.25])
        for side in (one, other):
            side.set_grads(n)
        norm = one.eager(1.0 if n < WARM else 0.25)
        assert same(call(other, tail).norm, norm)
        assert differences(one, other, grads=True) == []


def test_gradients_of_others_are_noticed() -> None:
    """A parameter that only the norm is to be over comes to have a gradient."""
    side = pair("sgd")[1]
    more = torch.nn.Parameter(torch.ones(3))
    tail = tail_of(side, clip_grad_norm=1.0, clip_parameters=[*side.params, more])
    for n in range(WARM):
        side.set_grads(n)
        tail()
    before = [p.detach().clone() for p in side.params]
    side.set_grads(4)
    more.grad = torch.ones(3)
    with pytest.raises(ValueError, match="no optimizer of the tail steps"):
        tail()
    assert all(map(torch.equal, before, side.params))


def test_a_scaler_is_asked_at_each_call() -> None:
    """Called twice, called by hand before, scaling anew, without gradients."""
    one, other = pair("sgd", scaled=True)
    tail = fuseopt.tail(other.opt, scaler=other.scaler, clip_grad_norm=1.0)
    for n in range(9):
        for side in (one, other):
            side.set_grads(n, n in (2, 5))
        if n == 4:
            other.scaler.unscale_(other.opt)
        if n == 6:
            for side in (one, other):
                side.scaler.update(512.0)
        norm = one.eager(1.0)
        out = tail()
        if n == 7:
            with pytest.raises(RuntimeError, match="has been called already"):
                tail()
        other.scaler.update()
        assert same(out.norm, norm)
        assert differences(one, other, grads=True) == []
    other.opt.zero_grad()
    with pytest.raises(UnsupportedInput, match="are None"):
        tail()


def test_hooks_and_modes_are_noticed() -> None:
    side = pair("sgd")[1]
    tail = fuseopt.tail(side.opt, clip_grad_norm=1.0)
    seen: list[str] = []

    class Asks(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    for n in range(WARM):
        side.set_grads(n)
        tail()
    hook = side.opt.register_step_pre_hook(lambda *_: seen.append("hook"))
    tail()
    hook.remove()
    assert seen == ["hook"]
    with Asks():
        tail()
    assert len(seen) > 10
    with torch.profiler.profile() as profile:
        tail()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}
    assert is_steady(side, tail)


def test_a_step_of_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of the optimizer is given another function that its step calls."""
    one, other = pair("trust")
    tail = tail_of(other, clip_grad_norm=1.0)
    kind = type(other.opt)
    for n in range(WARM + 4):
        if n == WARM:

            def step(self: Any) -> None:
                with torch.no_grad():
                    for group in self.param_groups:
                        for p in group["params"]:
                            p.sub_(p.grad, alpha=0.5)

            monkeypatch.setattr(kind, "step", torch.no_grad()(step))
        for side in (one, other):
            side.set_grads(n)
        one.eager(1.0)
        call(other, tail)
        assert differences(one, other, grads=True) == []


@pytest.mark.slow
def test_a_step_that_is_wrapped() -> None:
    """Whoever puts a function around `opt.step` is called, from the next call on."""
    one, other = pair("sgd")
    tail = fuseopt.tail(other.opt, clip_grad_norm=1.0)
    seen: list[int] = []

    def around(inner: Any, n: int) -> Any:
        def wrapped(*args: Any) -> Any:
            seen.append(n)
            return inner(*args)

        return wrapped

    inner = other.opt.step
    for n in range(WARM + 5):
        if n in (WARM, WARM + 2):
            other.opt.step = around(inner, n)  # type: ignore[method-assign]
        if n == WARM + 3:
            del other.opt.step
        for side in (one, other):
            side.set_grads(n)
        one.eager(1.0)
        call(other, tail)
        assert differences(one, other, grads=True) == []
    assert seen == [WARM, WARM, WARM + 2]


def test_a_scheduler_hears_of_a_steady_step() -> None:
    """One that is made when calls are steady as well."""
    side = pair("sgd")[1]
    tail = tail_of(side, clip_grad_norm=1.0)
    for n in range(WARM):
        side.set_grads(n)
        tail()
    schedule = torch.optim.lr_scheduler.ExponentialLR(side.opt, 0.5)
    known = len(fuseopt.reports())
    for n in range(3):
        side.set_grads(n)
        tail()
        if n == 0:
            assert len(fuseopt.reports()) == known
        schedule.step()  # which would warn if it came first
    assert side.opt.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("grad", [True, False])
def test_the_grad_mode_is_what_it_was(grad: bool) -> None:
    side = pair("sgd")[1]
    tail = tail_of(side, clip_grad_norm=1.0)
    for n in range(WARM):
        side.set_grads(n)
        tail()
    with torch.set_grad_enabled(grad):
        tail()
        assert torch.is_grad_enabled() is grad
        groups = side.opt.param_groups
        side.opt.param_groups = None  # type: ignore[assignment]
        with pytest.raises(TypeError):
            tail()
        side.opt.param_groups = groups
        assert torch.is_grad_enabled() is grad


def test_what_is_given_away_is_nobody_elses() -> None:
    """What the caller does to a norm says nothing to later calls; it stays as it is."""
    one, other = pair("sgd", scaled=True)
    tail = tail_of(other, clip_grad_norm=1.0)
    kept = []
    for n in range(80):
        for side in (one, other):
            side.set_grads(n, n % 7 == 3)
        norm = one.eager(1.0)
        out = call(other, tail)
        assert same(out.norm, norm)
        assert out.norm is not None
        kept.append((out.norm, norm, out.skips[0], n % 7 == 3))
        if n % 2:
            out.norm.fill_(0.0)
            kept.pop()
    assert differences(one, other, grads=True) == []
    assert all(same(mine, theirs) for mine, theirs, _, _ in kept)
    assert [bool(skip) for *_, skip, _ in kept] == [bad for *_, bad in kept]


def test_calls_of_two_kinds_in_turn() -> None:
    """What one was asked for is not what the other does."""
    one, other = pair()
    tail = tail_of(other, clip_grad_norm=1.0, ema=[(other.ema, 0.9)])
    for n in range(10):
        average, divisor = n % 3 > 0, 2 if n % 4 == 1 else None
        for side in (one, other):
            side.set_grads(n)
        if divisor:
            torch._foreach_div_([p.grad for p in one.params], divisor)
        norm = one.eager(1.0, 0.9 if average else None)
        out = tail(average=average, accumulated=divisor)
        assert same(out.norm, norm)
        assert differences(one, other, grads=True) == []


def test_gradients_are_not_kept() -> None:
    side = pair()[1]
    tail = tail_of(side, clip_grad_norm=1.0, ema=[(side.ema, 0.9)], zero_grad=True)
    for n in range(6):
        side.set_grads(n)
        grads = [weakref.ref(p.grad) for p in side.params]
        tail()
        assert [g() for g in grads] == [None] * len(grads)


def test_threads_take_turns() -> None:
    side, other = (Side(MAKES["adamw"], SHAPES) for _ in range(2))
    tails = [tail_of(x, clip_grad_norm=1.0) for x in (side, other)]
    for n in range(5):
        for x, tail in zip((side, other), tails, strict=True):
            x.set_grads(n)
            tail()

    def several() -> None:
        for _ in range(10):
            tails[0]()

    side.set_grads(5)
    other.set_grads(5)
    threads = [threading.Thread(target=several) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _ in range(30):
        tails[1]()
    assert differences(side, other, grads=True) == []
