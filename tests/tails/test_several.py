"""Tails of several optimizers with many lanes: each step is led, after one norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.tails.arguments import overlap
from fuseopt.tails.led_several import MANY
from tests.tails.test_random import MAKES, Drawn
from tests.tails.test_tail import MAKES as NAMED
from tests.tails.twins import Side, differences, same

SHAPES = [(5, 3), (7,), (), (4, 4, 2), (1, 9)]
FEW = "{} of 40 lanes; they stand for the others"
#: What a user may set between two calls, and to what.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "clip_grad_norm": (None, 0.5, torch.tensor(0.7), float("inf")),
    "clip_grad_value": (None, 0.3),
    "norm_type": (1.0, 2.0, float("inf")),
    "zero_grad": (False, True, "zeros"),
    "decay": (0.5, 0.99),
    "lr": (0.1, 0.003),
    "missing": (0.1, 0.5, 0.97),
    "overflow": (True,),
    "": ("",),
}


class Several(Drawn):
    """Optimizers beside others alike; the tail of the second ones, all drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, NUMBERS)
        draw = self.draw
        n = draw.choice([2, 2, 3])
        self.lanes = MANY // n + 1
        dtypes = draw.choice([[torch.float32], [torch.float32, torch.bfloat16]])
        self.scaled = draw.random() < 0.5
        plans = [
            (
                draw.choice(MAKES),
                [draw.choice(SHAPES) for _ in range(self.lanes)],
                draw.choice(dtypes),
            )
            for _ in range(n)
        ]
        self.mine, self.twins = (
            [Side(*plan, scaled=self.scaled) for plan in plans] for _ in range(2)
        )
        self.now["zero_grad"] = False
        mine = self.mine
        self.tail = fuseopt.tail(
            [side.opt for side in mine],
            scaler=mine[0].scaler,
            ema=[([t for x in mine for t in x.ema], 0.9)] if self.averaged else [],
            check=True,
        )

    def turn(self, n: int) -> list[str]:
        """One call of both; what differs, after what was set."""
        event, value = self.change()
        for side, twin in zip(self.mine, self.twins, strict=True):
            bad = self.scaled and event == "overflow" and self.draw.random() < 0.5
            n_absent = int(self.lanes * value) if event == "missing" else 0
            absent = self.draw.sample(range(self.lanes), n_absent)
            for x in (side, twin):
                x.set_grads(n, bad)
                for k in absent:
                    x.params[k].grad = None
                for group in x.opt.param_groups:
                    group["lr"] = value if event == "lr" else group["lr"]
        norm = self.eager()
        out = self.call(self.mine[0].scaler)
        pairs = zip(self.twins, self.mine, strict=True)
        found = [x for pair in pairs for x in differences(*pair, grads=True)]
        found += [] if norm is None or same(norm, out.norm) else ["norm"]
        return [f"call {n}, {event} {value}: {x}" for x in found]

    def eager(self) -> torch.Tensor | None:
        now, twins = self.now, self.twins
        scaler = twins[0].scaler
        params = [p for side in twins for p in side.params]
        for side in twins if self.scaled else ():
            scaler.unscale_(side.opt)
        norm = None
        if now["clip_grad_norm"] is not None:
            limits = now["clip_grad_norm"], now["norm_type"]
            norm = torch.nn.utils.clip_grad_norm_(params, *limits)
        if now["clip_grad_value"] is not None:
            torch.nn.utils.clip_grad_value_(params, now["clip_grad_value"])
        for side in twins:
            if self.scaled:
                scaler.step(side.opt)
            else:
                side.opt.step()
        if self.averaged:
            with torch.no_grad():
                averages = [t for side in twins for t in side.ema]
                torch._foreach_lerp_(averages, params, 1 - now["decay"])
        if self.scaled:
            scaler.update()
        for side in twins if now["zero_grad"] else ():
            side.opt.zero_grad(set_to_none=now["zero_grad"] is True)
        # all sides have one scaler's state
        for side in (*self.mine[1:], *twins[1:]):
            side.scaler = None
        return norm


@pytest.mark.family(12)
@pytest.mark.parametrize("seed", range(24))
def test_random_tails(seed: int) -> None:
    drawn = Several(seed)
    for n in range(drawn.draw.randint(4, 7)):
        assert drawn.turn(n) == []


def two(names: tuple[str, str] = ("adamw", "sgd")) -> tuple[list[Side], list[Side]]:
    mine, twins = ([Side(NAMED[x], SHAPES * 8) for x in names] for _ in range(2))
    return mine, twins


def eager(twins: list[Side]) -> torch.Tensor:
    params = [p for side in twins for p in side.params]
    norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
    for side in twins:
        side.opt.step()
    return norm


def check(mine: list[Side], twins: list[Side]) -> None:
    for pair in zip(twins, mine, strict=True):
        assert differences(*pair, grads=True) == []


def test_a_launch_for_each_after_one_norm() -> None:
    """Dynamo traces few lanes of each, and no more for other gradients."""
    mine, twins = two()
    tail = fuseopt.tail([x.opt for x in mine], clip_grad_norm=1.0, fallback="error")
    known = len(fuseopt.reports())
    for n in range(12):
        for side in (*mine, *twins):
            side.set_grads(n)
            if n > 3:
                for p in side.params[n % 3 :: 3]:
                    p.grad = None
        assert same(tail().norm, eager(twins))
        check(mine, twins)
        if n == 4:
            seen = len(fuseopt.reports())
    reports = fuseopt.reports()[known:]
    assert [x.launches for x in reports] == [2, 1] * 2
    assert [x.traced.partition(", ")[2] for x in reports] == [FEW.format(4)] * 2 + [
        FEW.format(8)
    ] * 2
    assert len(fuseopt.reports()) == seen


def test_gradients_that_overlap() -> None:
    """Of two optimizers, in one call: eager scales what they share twice."""
    mine, twins = two(("sgd", "sgd"))
    tail = fuseopt.tail(
        [x.opt for x in mine], clip_grad_norm=1.0, zero_grad=True, fallback="eager"
    )
    for n in range(6):
        for sides in (mine, twins):
            for side in sides:
                side.set_grads(n)
            if n == 4:
                room = torch.arange(10.0)
                sides[0].params[1].grad = room[:7]
                sides[1].params[1].grad = room[3:]
        assert same(tail().norm, eager(twins))
        for side in twins:
            side.opt.zero_grad()
        check(mine, twins)


def test_memory_that_tensors_share() -> None:
    room = torch.zeros(6, 4)
    assert not overlap([room[:3], room[3:], torch.zeros(0)])
    assert overlap([room[:3], room[2:]])
    assert overlap([room[:, 0], room[1:2]])
    assert not overlap([room[:5, 0], room[5:]])
    assert overlap([room, room])
    assert not overlap([torch.zeros(0), torch.zeros(0)])


def test_a_step_that_cannot_be_led() -> None:
    """The tail is one graph of all lanes then, or runs in pieces."""

    class Global(torch.optim.Optimizer):
        """One number of all parameters scales each update."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                grads = [p.grad for p in group["params"]]
                total = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
                for p, g in zip(group["params"], grads, strict=True):
                    self.state[p].setdefault("n", torch.zeros(()))
                    self.state[p]["n"].add_(1)
                    p.sub_(g / (total + 1), alpha=group["lr"])

    mine, twins = ([Side(Global, SHAPES * 8), Side(NAMED["sgd"], SHAPES)] for _ in "ab")
    tail = fuseopt.tail([x.opt for x in mine], clip_grad_norm=1.0)
    for n in range(5):
        for side in (*mine, *twins):
            side.set_grads(n)
        assert same(tail().norm, eager(twins))
        check(mine, twins)
