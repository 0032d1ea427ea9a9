"""Random tails, whose numbers move between calls, beside what trainers write."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from tests.papers.adaptive import AdaBelief
from tests.papers.reducing import LAMB
from tests.tails.twins import Make, Side, call, differences, same

SHAPES = [(7, 5), (13,), (3, 2), (), (64,), (1, 1), (0, 3), (40, 33), (2, 3, 4)]
MAKES: list[Make] = [
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    lambda ps: torch.optim.AdamW(ps, lr=0.01),
    lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True),
    lambda ps: torch.optim.NAdam(ps, lr=0.01),
    lambda ps: torch.optim.RAdam(ps, lr=0.01),
    lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    lambda ps: torch.optim.Adadelta(ps, lr=0.1),
    lambda ps: torch.optim.Adamax(ps, lr=0.01),
    lambda ps: torch.optim.ASGD(ps, lr=0.01),
    lambda ps: torch.optim.Rprop(ps, lr=0.01),
    lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    lambda ps: LAMB(ps, lr=0.01),
    lambda ps: AdaBelief(ps, lr=0.01),
]
#: What a user may set between two calls, and to what.
NUMBERS: dict[str, tuple[Any, ...]] = {
    "clip_grad_norm": (None, 0.5, 2.0, torch.tensor(0.7), float("inf")),
    "clip_grad_value": (None, 0.3, torch.tensor(0.2)),
    "norm_type": (1.0, 2.0, float("inf"), 3.0),
    "decay": (0.5, 0.99, torch.tensor(0.8)),
    "lr": (0.0, 0.1, 0.003),
    "average": (True, False),
    "missing": (True,),
    "": ("",),
}


class Drawn:
    """A tail whose options are drawn anew before each call, `numbers` by their names.

    `now`: those of the present call. `averaged`: has it an average?
    """

    tail: Any

    def __init__(self, seed: int, numbers: dict[str, tuple[Any, ...]]) -> None:
        self.draw, self.numbers = random.Random(seed), numbers
        self.averaged = self.draw.random() < 0.5
        self.now: dict[str, Any] = {"clip_grad_norm": 1.0, "norm_type": 2.0}
        self.now |= {"clip_grad_value": None, "decay": 0.9}

    def change(self) -> tuple[str, Any]:
        """Draw what changes before a call, and its value."""
        event = self.draw.choice([*self.numbers])
        value = self.draw.choice(self.numbers[event])
        if event in self.now:
            self.now[event] = value
        return event, value

    def call(self, scaler: Any, average: bool = True) -> Any:
        """Call the tail, and update the scaler."""
        for name, value in self.now.items():
            if name != "decay":
                setattr(self.tail, name, value)
            elif self.averaged:
                self.tail.decays[0] = value
        out = self.tail(average=average)
        if scaler is not None:
            scaler.update()
        return out


class Random(Drawn):
    """Two sides alike and a tail of the second, all drawn."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, NUMBERS)
        draw = self.draw
        make = draw.choice(MAKES)
        shapes = draw.sample(SHAPES, draw.randint(1, 6))
        if draw.random() < 0.6:
            shapes = [draw.choice(SHAPES[:3]) for _ in range(20)]
        scaled = draw.random() < 0.5
        dtype = draw.choice([*[torch.float32] * 3, torch.float64, torch.bfloat16])
        self.sides = [Side(make, shapes, dtype, scaled) for _ in range(2)]
        self.zeroed = draw.choice([False, True, "zeros"])
        self.now["clip_grad_norm"] = draw.choice([None, 1.0])
        ema = [(self.sides[1].ema, 0.9)] if self.averaged else []
        other = self.sides[1]
        self.tail = fuseopt.tail(
            other.opt, scaler=other.scaler, zero_grad=self.zeroed, ema=ema, check=True
        )

    def turn(self, n: int) -> list[str]:
        """One call of both; what differs, after what was set."""
        event, value = self.change()
        bad = self.sides[0].scaler is not None and self.draw.random() < 0.2
        for side in self.sides:
            params = side.params
            side.set_grads(n, bad and bool(params[n % len(params)].numel()))
            if event == "missing" and len(params) > 1:
                params[n % len(params)].grad = None
            for group in side.opt.param_groups:
                group["lr"] = value if event == "lr" else group["lr"]
        average = value if event == "average" else True
        try:
            norm = self.eager(self.sides[0], average)
        except RuntimeError as error:  # an infinity norm of nothing, say
            with pytest.raises(RuntimeError, match=str(error)[:20]):
                self.call(self.sides[1].scaler, average)
            return ["raised"]
        out = self.call(self.sides[1].scaler, average)
        found = differences(*self.sides, grads=True)
        found += [] if norm is None or same(norm, out.norm) else ["norm"]
        averages = zip(*(side.ema for side in self.sides), strict=True)
        found += [f"average {i}" for i, (a, b) in enumerate(averages) if not same(a, b)]
        return [f"call {n}, {event} {value}: {x}" for x in found]

    def eager(self, side: Side, average: bool) -> Tensor | None:
        now = self.now
        decay = now["decay"] if self.averaged and average else None
        limits = now["clip_grad_norm"], decay, now["clip_grad_value"], now["norm_type"]
        norm = side.eager(*limits)
        if self.zeroed:
            side.opt.zero_grad(set_to_none=self.zeroed is True)
        return norm


@pytest.mark.family(40)
@pytest.mark.parametrize("seed", range(80))
def test_random_tails(seed: int) -> None:
    """A limit that is a tensor was an ulp off: eager takes the reciprocal first."""
    drawn = Random(seed)
    for n in range(drawn.draw.randint(4, 9)):
        found = drawn.turn(n)
        if found == ["raised"]:
            return
        assert found == []


@pytest.mark.family(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_limits_that_are_tensors(dtype: torch.dtype) -> None:
    """In one graph, with the bits of limits that are numbers."""
    one, other = (Side(MAKES[1], dtype=dtype) for _ in range(2))
    tail = fuseopt.tail(other.opt, fallback="error", check=True)
    for n in range(20):
        limit = torch.tensor(0.1 + 0.7 * n)
        tail.clip_grad_norm, tail.clip_grad_value = limit, limit / 10
        for side in (one, other):
            side.set_grads(n)
        one.eager(limit, max_value=float(limit / 10))
        call(other, tail)
        assert differences(one, other, grads=True) == [], n


@pytest.mark.parametrize("lanes", [3, 20])
def test_a_decay_that_is_a_tensor_is_not_rounded(lanes: int) -> None:
    """Averages in bfloat16 were given its weight in bfloat16."""
    shapes = (SHAPES[:3] * 7)[:lanes]
    one, other = (Side(MAKES[0], shapes, torch.bfloat16) for _ in range(2))
    tail = fuseopt.tail(other.opt, ema=[(other.ema, 0.9)], fallback="error", check=True)
    for n in range(4):
        decay = torch.tensor(0.8 + n / 100)
        tail.decays[0] = decay
        for side in (one, other):
            side.set_grads(n)
        one.eager(None, decay)
        call(other, tail)
        assert differences(one, other, grads=True) == [], n
