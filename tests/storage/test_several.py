"""Several optimizers with packed state in one tail: a launch for the norm, one each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import torch

import fuseopt
from fuseopt import Storage
from fuseopt.errors import CaptureError
from fuseopt.offload import MasterOptimizer
from tests.storage.reference import (
    Params,
    Reference,
    assert_same,
    give_grads,
    params_of,
    same_bits,
)
from tests.storage.test_table import SIZES

Make = Callable[..., torch.optim.Optimizer]
slow = pytest.mark.slow
STRICT = {"fallback": "error"}


def momentum(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, momentum=0.9, **options)


class Several:
    """Each optimizer in eager on packed state after one clip; and one tail of all."""

    def __init__(
        self,
        *kinds: tuple[Make, str],
        scaled: bool = False,
        n: int = 4,
        options: dict[str, Any] = STRICT,
        **asked: Any,
    ) -> None:
        self.number, self.clip = 0, asked.get("clip_grad_norm")
        self.lists: list[tuple[Params, Params]] = []
        self.references: list[Reference] = []
        self.mine: list[Any] = []
        for seed, (make, name) in enumerate(kinds):
            theirs, ours = (params_of(n, seed, sizes=SIZES) for _ in range(2))
            self.lists.append((theirs, ours))
            self.references.append(Reference(make(theirs, lr=1e-2), name or {}))
            optimizer: Any = make(ours, lr=1e-2)
            if name:
                storage = Storage(name, least=0)
                optimizer = fuseopt.compile(optimizer, storage=storage)
            self.mine.append(optimizer)
        self.averages = [[p.detach().clone() for p in x] for x in self.every]
        self.scalers: list[torch.amp.GradScaler] = []
        if scaled:
            self.scalers = [
                torch.amp.GradScaler("cpu", init_scale=8, growth_interval=2)
                for _ in range(2)
            ]
            for scaler in self.scalers:
                scaler.scale(torch.zeros(1))
        ema = [(self.averages[1], 0.9)]
        scaler = self.scalers[1] if scaled else None
        self.tail = fuseopt.tail(self.mine, scaler=scaler, ema=ema, **asked, **options)

    @property
    def every(self) -> tuple[Params, Params]:
        theirs, ours = zip(*self.lists, strict=True)
        return [p for x in theirs for p in x], [p for x in ours for p in x]

    def step(self, bad: int | None = None, missing: int = 0) -> Any:
        """One tail; `bad`: the optimizer with a gradient that is not finite."""
        theirs, ours = self.every
        give_grads(self.number, theirs, ours, missing=missing)
        self.number += 1
        for p in (*theirs, *ours):
            if self.scalers and p.grad is not None:
                p.grad *= self.scalers[0].get_scale()
        if bad is not None:
            for params in self.lists[bad]:
                next(p.grad for p in params if p.grad is not None).view(-1)[0] = (
                    torch.inf
                )
        norm = self._in_eager(theirs)
        outcome = self.tail()
        if self.scalers:
            self.scalers[1].update()
            assert self.scalers[0].get_scale() == self.scalers[1].get_scale()
        assert norm is None or same_bits(norm, outcome.norm)
        every = zip(self.references, self.lists, self.mine, strict=True)
        for reference, (a, b), optimizer in every:
            assert_same(reference, a, b, optimizer)
        assert all(map(same_bits, *self.averages))
        return outcome

    def _in_eager(self, theirs: Params) -> Any:
        norm, scaler = None, self.scalers[0] if self.scalers else None
        if scaler is not None:
            for reference in self.references:
                scaler.unscale_(reference.optimizer)
        if self.clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(theirs, self.clip)
        for reference in self.references:
            if scaler is None:
                reference.step()
                continue
            state = scaler._per_optimizer_states[id(reference.optimizer)]
            if not sum(x.item() for x in state["found_inf_per_device"].values()):
                reference.step()
        if scaler is not None:
            scaler.update()
        for average, p in zip(self.averages[0], theirs, strict=True):
            average.lerp_(p.detach(), 1 - 0.9)
        return norm


def launches_of(several: Several, bads: dict[int, int], n: int = 6, **how: Any) -> int:
    """Do steps; return the launches of one of them, from the Reports of all."""
    several.step()  # makes the state
    before = len(fuseopt.reports())
    for step in range(1, n):
        several.step(bad=bads.get(step), **how)
    reports = fuseopt.reports()[before:]
    assert [x.fallback for x in reports] == [""] * len(several.mine)
    return sum(x.launches for x in reports)


ADAM, SGD, LION = torch.optim.AdamW, momentum, lion_pytorch.Lion
PAIRS = [
    ((ADAM, "bf16"), (SGD, "split")),
    pytest.param((ADAM, "8bit/64"), (LION, "bf16-stochastic"), marks=slow),
    pytest.param((SGD, "fp8-e4m3"), (ADAM, ""), marks=slow),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_one_norm_and_a_launch_for_each(one: Any, other: Any) -> None:
    assert launches_of(Several(one, other, clip_grad_norm=1.0), {}) == 3


@slow
def test_each_is_skipped_separately() -> None:
    """A flag of one optimizer skips that one alone, and counts no draw of it."""
    kinds = (ADAM, "bf16-stochastic"), (SGD, "8bit/64"), (LION, "bf16")
    several = Several(*kinds, scaled=True)
    assert launches_of(several, {2: 1, 4: 0}, 7) == 4


@slow
def test_a_clip_spreads_what_is_not_finite_and_the_judge_skips_all() -> None:
    several = Several((ADAM, "bf16"), (SGD, "bf16"), clip_grad_norm=1.0)
    several.step()
    several.step()
    several.tail.skip_nonfinite = True
    before = [p.detach().clone() for p in several.every[1]]
    give_grads(9, several.every[1])
    several.lists[1][1][0].grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    outcome = several.tail()
    assert [bool(x) for x in outcome.skips] == [True, True]
    assert all(map(same_bits, before, several.every[1]))


@slow
def test_without_a_norm_there_is_a_launch_for_each() -> None:
    assert launches_of(Several((ADAM, "bf16"), (SGD, "bf16")), {}) == 2


@slow
def test_gradients_are_missing() -> None:
    several = Several((ADAM, "bf16"), (SGD, "split"), clip_grad_norm=1.0, n=6)
    for step in range(8):
        several.step(missing=0 if step < 2 else 4)
    assert all(not x.fallback for x in fuseopt.reports()[-3:])


@slow
def test_numbers_change_between_calls() -> None:
    several = Several((ADAM, "bf16"), (SGD, "bf16"), clip_grad_norm=1.0)
    for step in range(6):
        several.clip = several.tail.clip_grad_norm = 1.0 / (1 + step)
        for x in (*several.mine, *(y.optimizer for y in several.references)):
            x.param_groups[0]["lr"] = 0.1 / (1 + step)
        several.step()


@slow
def test_a_checkpoint_between_calls() -> None:
    several = Several((ADAM, "bf16-stochastic"), (SGD, "8bit/64"), clip_grad_norm=1.0)
    for _ in range(3):
        several.step()
    for optimizer in several.mine:
        optimizer.load_state_dict(optimizer.state_dict())
    several.step()
    several.step()


class Unlike(torch.optim.SGD):
    """A step that reads all gradients, so that no lane stands for the others."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [p for g in self.param_groups for p in g["params"]]
        total = sum(p.grad.square().sum() for p in params)
        for p in params:
            p.sub_(p.grad / (1 + total), alpha=0.1)
            state = self.state[p]
            state["sum"] = state.get("sum", torch.zeros_like(p))
            state["sum"].add_(p.grad)


@slow
@pytest.mark.parametrize("first", [False, True])
def test_a_step_that_cannot_be_led(first: bool) -> None:
    """If others have stepped, it is stepped in eager with the factors of the norm."""
    kinds: list[Any] = [(ADAM, "bf16"), (Unlike, "bf16")]
    several = Several(
        *(kinds[::-1] if first else kinds), clip_grad_norm=1.0, options={}
    )
    before = len(fuseopt.reports())
    several.step()
    with pytest.warns(RuntimeWarning, match="runs in eager"):
        several.step()
    several.step()
    several.step()
    reasons = [x.fallback for x in fuseopt.reports()[before:]]
    assert any("in pieces" in x for x in reasons)
    assert any("stepped in eager" in x for x in reasons) != first


def test_what_one_tail_cannot_do_is_named() -> None:
    both = [
        fuseopt.compile(torch.optim.AdamW(params_of(4)), storage="bf16")
        for _ in range(2)
    ]
    strict = fuseopt.tail(both, clip_grad_norm=1.0, stats=True, fallback="error")
    every = [p for x in both for p in x.param_groups[0]["params"]]
    give_grads(0, every)
    strict()  # makes the state
    with pytest.raises(CaptureError, match="kept packed; stats need optimizers"):
        strict()


@slow
def test_masters_beside_packed_state() -> None:
    """Weights of float32 with packed state, and masters of weights of 16 bits."""
    wide = [params_of(4, sizes=SIZES) for _ in range(2)]
    narrow = [params_of(4, 1, torch.bfloat16, SIZES) for _ in range(2)]
    masters = [torch.nn.Parameter(p.detach().float()) for p in narrow[0]]
    theirs = (
        Reference(ADAM(wide[0], lr=0.01), "bf16"),
        Reference(SGD(masters, lr=0.01), "split"),
    )
    ours: list[Any] = [
        fuseopt.compile(ADAM(wide[1], lr=0.01), storage="bf16"),
        MasterOptimizer(narrow[1], SGD, master="split", storage="split", lr=0.01),
    ]
    tail = fuseopt.tail(ours, clip_grad_norm=1.0, zero_grad=True, **STRICT)
    for step in range(5):
        give_grads(step, *wide)
        give_grads(50 + step, *narrow)
        for p, master in zip(narrow[0], masters, strict=True):
            master.grad = p.grad.float()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_([*wide[0], *masters], 1.0)
        for reference in theirs:
            reference.step()
        assert same_bits(norm, tail().norm)
        assert_same(theirs[0], *wide, ours[0])
        held = ours[1]._masters.every
        assert all(same_bits(m, x.wide()) for m, x in zip(masters, held, strict=True))
        assert all(p.grad is None for p in (*wide[1], *narrow[1]))
