"""Lists that were given to a tail are read at each call, as a trainer's lines do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fuseopt
from tests.tails.test_tail import MAKES
from tests.tails.twins import SHAPES, Side, same

DECAY, LIMIT, CALLS = 0.75, 0.5, 9


class Lists:
    """One optimizer with all lists that a tail may be given."""

    def __init__(self, times: int) -> None:
        self.side = Side(MAKES["adamw"], SHAPES * times)
        self.order = [*self.side.params]
        self.ema = self.side.ema
        self.second = [torch.ones_like(x) for x in self.ema]
        self.source = [p.detach() for p in self.side.params]
        self.copies = [x.bfloat16() for x in self.ema]

    def eager(self) -> torch.Tensor:
        """What trainers write."""
        norm = torch.nn.utils.clip_grad_norm_(self.order, LIMIT)
        self.side.opt.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.side.params, 1 - DECAY)
            torch._foreach_lerp_(self.second, self.source, 1 - DECAY)
            torch._foreach_copy_(self.copies, self.side.params)
        return norm

    def tail(self) -> Callable[[], Any]:
        tail = fuseopt.tail(
            self.side.opt,
            clip_grad_norm=LIMIT,
            clip_parameters=self.order,
            ema=[(self.ema, DECAY), (self.second, self.source, DECAY)],
            copies=self.copies,
        )
        return lambda: tail().norm

    def held(self) -> list[torch.Tensor]:
        grads = [p.grad for p in self.side.params if p.grad is not None]
        lists = self.side.params, self.ema, self.second, self.source, self.copies
        return [*grads, *(x for one in lists for x in one)]


def swap(x: list[Any]) -> None:
    """The first and the fourth of a list; both have other shapes in `SHAPES`."""
    x[0], x[len(SHAPES)] = x[len(SHAPES)], x[0]


#: What a user does to a list; each with one parameter of each shape, or more.
CHANGES: dict[str, Callable[[Lists], Any]] = {
    "an average": lambda x: x.ema.__setitem__(2, torch.zeros_like(x.ema[2])),
    "all averages": lambda x: x.ema.__setitem__(
        slice(None), [torch.ones_like(t) for t in x.ema]
    ),
    "a source": lambda x: x.source.__setitem__(1, torch.ones_like(x.source[1])),
    "a copy": lambda x: x.copies.__setitem__(3, torch.ones_like(x.copies[3])),
    "another dtype": lambda x: x.copies.__setitem__(0, x.copies[0].double()),
    "the order": lambda x: x.order.reverse(),
    "two averages": lambda x: swap(x.ema),
    "nothing": lambda x: x.ema.__setitem__(0, x.ema[0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_a_list_that_changes(name: str, times: int) -> None:
    """At a call that would repeat the last one, and at the one after that."""
    one, other = Lists(times), Lists(times)
    call = other.tail()
    for turn in range(CALLS):
        for x in (one, other):
            x.side.set_grads(turn)
            if turn in (5, 6):
                CHANGES[name](x)
        assert same(call(), one.eager()), turn
        assert all(map(same, other.held(), one.held())), turn


#: Lists that no tail takes: what is wrong, and what mends it.
WRONG: dict[str, tuple[Callable[[Lists], Any], str]] = {
    "one less": (lambda x: x.ema.pop(), "tensors, and there are"),
    "another shape": (lambda x: x.ema.__setitem__(0, torch.ones(3)), "its shape"),
    "the parameter": (
        lambda x: x.copies.__setitem__(0, x.side.params[0].detach()),
        "shares memory",
    ),
    "twice": (lambda x: x.order.append(x.order[0]), "twice"),
    "not all": (lambda x: x.order.pop(), "not in clip_parameters"),
    "none": (lambda x: x.order.clear(), "not in clip_parameters"),
    "a stranger": (
        lambda x: x.order.append(stranger()),
        "no optimizer of the tail steps",
    ),
}


def stranger() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    return p


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_list_that_is_refused(name: str) -> None:
    """At each call until it is mended; nothing is written."""
    one, other = Lists(2), Lists(2)
    call = other.tail()
    lists = other.ema, other.copies, other.order
    spoil, message = WRONG[name]
    for turn in range(CALLS):
        for x in (one, other):
            x.side.set_grads(turn)
        if turn == 5:
            good = [[*x] for x in lists]
            spoil(other)
            before = [t.clone() for t in other.held()]
            for _ in range(2):
                with pytest.raises(ValueError, match=message):
                    call()
            assert all(map(same, other.held(), before))
            for x, entries in zip(lists, good, strict=True):
                x[:] = entries
        assert same(call(), one.eager()), turn
        assert all(map(same, other.held(), one.held())), turn
