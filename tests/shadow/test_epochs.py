"""A shadow takes over numbers that a StateGuard found, and equals a new shadow."""

from __future__ import annotations

import random
from collections.abc import Callable
from operator import is_
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW

from fuseopt import compat
from fuseopt.inputs.state_guard import Epoch, StateGuard
from fuseopt.shadow.mirrored import Part
from fuseopt.shadow.optimizer import Shadow
from tests.steps import make_params, set_grads


class Holds(AdamW):
    """With numbers in attributes, one of them in a dict and in a tuple."""

    def __init__(self, params: Any) -> None:
        half = len(params) // 2
        groups = [{"params": params[:half]}, {"params": params[half:], "lr": 0.25}]
        super().__init__(groups, lr=0.5)
        self.rate, self.calls = 0.75, 3
        self.table, self.pair = {"a": 1.5}, (1.25, 2)
        self._done_hooks = 1


Event = Callable[[Holds, float], None]


def rate(opt: Holds, x: float) -> None:
    opt.param_groups[0]["lr"] = x


def both(opt: Holds, x: float) -> None:
    for k, group in enumerate(opt.param_groups):
        group["lr"] = x + k
        group["weight_decay"] = x - k


def attribute(opt: Holds, x: float) -> None:
    opt.rate, opt.calls = x, int(x * 1000)


def numpy_number(opt: Holds, x: float) -> None:
    opt.param_groups[1]["lr"] = np.float64(x)


def integer(opt: Holds, x: float) -> None:
    opt.param_groups[1]["lr"] = 2


def a_tuple(opt: Holds, x: float) -> None:
    opt.param_groups[0]["betas"] = (x, 0.99)


def nested(opt: Holds, x: float) -> None:
    opt.table["a"] = x


def not_copied(opt: Holds, x: float) -> None:
    opt._done_hooks = x  # type: ignore[assignment]


def key_again(opt: Holds, x: float) -> None:
    opt.param_groups[0]["eps"] = opt.param_groups[0].pop("eps")


def new_key(opt: Holds, x: float) -> None:
    opt.param_groups[0][f"n{x}"] = x


def a_flag(opt: Holds, x: float) -> None:
    opt.param_groups[0]["maximize"] = not opt.param_groups[0]["maximize"]


def a_group_anew(opt: Holds, x: float) -> None:
    opt.param_groups[1] = {**opt.param_groups[1], "lr": x}


def nothing(opt: Holds, x: float) -> None:
    pass


PLAIN: list[Event] = [rate, both, attribute, nothing]
EVENTS: list[Event] = [
    *PLAIN,
    *(numpy_number, integer, a_tuple, nested, not_copied),
    *(key_again, new_key, a_flag, a_group_anew),
]


def contents(x: Any) -> Any:
    """Return a value as data: numbers with their type, the rest by identity."""
    if isinstance(x, dict):
        return [(k, contents(y)) for k, y in x.items()]
    if isinstance(x, list | tuple):
        return [type(x), *map(contents, x)]
    number = isinstance(x, int | float)
    return (type(x), x) if number else id(x)


def holds(shadow: Shadow) -> list[Any]:
    inside = vars(shadow.stand_in)
    keep = {k: x for k, x in inside.items() if k != "state"}
    return [contents(keep), [*inside["state"].values()]]


class Followed:
    """A shadow over the lanes of one model, as a trace has it."""

    def __init__(self, opt: Holds) -> None:
        self.shadow = Shadow(opt, follows=True)
        self.state: Any = {}
        self.lists = [[*group["params"]] for group in opt.param_groups]

    def refresh(self, opt: Holds, epoch: Epoch | None) -> None:
        self.shadow.refresh(opt, self.state, self.lists, epoch)


@pytest.mark.parametrize("seed", range(40))
def test_a_shadow_is_as_a_new_one(seed: int) -> None:
    """Of two shadows one skips calls, as the shadow of another trace does."""
    draw = random.Random(seed)
    opt = Holds(make_params([(3,)] * 4))
    guard = StateGuard()
    steady, now_and_then = Followed(opt), Followed(opt)
    for k in range(24):
        for _ in range(draw.choice((1, 1, 2))):
            events = PLAIN if draw.random() < 0.7 else EVENTS
            draw.choice(events)(opt, draw.random())
        guard.compare(opt)
        for one in (steady, *([now_and_then] if k % 3 else [])):
            one.refresh(opt, guard.epoch)
            fresh = Followed(opt)
            fresh.shadow.numpy_names = one.shadow.numpy_names
            fresh.refresh(opt, None)
            assert holds(one.shadow) == holds(fresh.shadow)
            assert not one.shadow.changed()
            for group, real in zip(
                one.shadow.stand_in.param_groups, opt.param_groups, strict=True
            ):
                stands = one.shadow.stands_for_numpy(group["lr"])
                assert stands or group["lr"] is real["lr"]
                if compat.is_numpy_float(real["lr"]):
                    assert stands


def test_numbers_that_moved_are_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shadow compares and records nothing when only numbers moved."""
    opt = Holds(make_params([(3,)] * 4))
    guard, one = StateGuard(), Followed(opt)

    def call() -> None:
        guard.compare(opt)
        one.refresh(opt, guard.epoch)

    call()

    def refused(*args: Any) -> None:
        raise AssertionError("the shadow recorded its contents again")

    monkeypatch.setattr(Part, "note_again", refused)
    monkeypatch.setattr(Shadow, "_refresh", refused)
    before = one.shadow.stand_in.param_groups[0]
    for k in range(5):
        both(opt, 0.1 * k)
        attribute(opt, 0.3 * k)
        call()
        assert one.shadow.stand_in.param_groups[0] is before
        assert before["lr"] is opt.param_groups[0]["lr"]
        assert one.shadow.stand_in.rate is opt.rate
    a_tuple(opt, 0.5)
    with pytest.raises(AssertionError, match="recorded"):
        call()


def test_an_epoch_does_not_keep_those_before_it() -> None:
    opt = Holds(make_params([(3,)] * 4))
    guard = StateGuard()
    guard.compare(opt)
    epochs = [guard.epoch]
    for k in range(4):
        rate(opt, 0.1 * k)
        guard.compare(opt)
        epochs.append(guard.epoch)
    assert epochs[-1].before is epochs[-2]
    assert all(map(is_, [x.before for x in epochs[:-1]], [None] * 4))


def test_a_step_after_a_moved_rate_has_eagers_bits() -> None:
    """With a second optimizer's step between, and a rate that moves back."""
    import fuseopt

    ours, theirs = (make_params([(3,)] * 20) for _ in range(2))
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)
    opt, plain = Holds(ours), Holds(theirs)
    fuseopt.compile(opt, fallback="error")
    for k in range(12):
        set_grads(ours, theirs, k)
        for one in (opt, plain):
            rate(one, (0.5, 0.25, 0.5)[k % 3])
            if k % 4 == 3:
                numpy_number(one, 0.125)
            one.step()
        assert all(map(torch.equal, ours, theirs))
