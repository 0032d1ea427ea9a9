"""Tails of packed state: the bits of clip, unpack, step, pack, in a tail's launches."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_optimizer
import torch

import fuseopt
from fuseopt import Storage
from tests.storage.reference import (
    Reference,
    assert_same,
    give_grads,
    params_of,
    same_bits,
)
from tests.storage.test_table import SIZES

slow = pytest.mark.slow
STEPS, BAD = 6, 3


class Run:
    """The meaning in eager, and a tail of packed state."""

    def __init__(
        self, name: str, make: Any = torch.optim.AdamW, n: int = 8, **asked: Any
    ) -> None:
        self.number, self.asked = 0, asked
        self.lists = params_of(n, sizes=SIZES), params_of(n, sizes=SIZES)
        self.averages = [[p.detach().clone() for p in x] for x in self.lists]
        self.reference = Reference(make(self.lists[0], lr=1e-2), name)
        plain = make(self.lists[1], lr=1e-2)
        self.mine = fuseopt.compile(plain, storage=Storage(name, least=0))
        self.scaler: Any = None
        if asked.get("scaled"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8, growth_interval=2)
            self.scaler.scale(torch.zeros(1))
        ema = [(self.averages[1], 0.9)] if asked.get("averaged") else []
        self.tail = fuseopt.tail(
            self.mine,
            clip_grad_norm=asked.get("clip"),
            scaler=self.scaler,
            skip_nonfinite=bool(asked.get("judged")),
            ema=ema,
            zero_grad=asked.get("zero", False),
            **asked.get("options", {}),
        )

    def step(self, bad: bool = False, missing: int = 0) -> None:
        """One tail; `bad`: with a gradient that is not finite."""
        give_grads(self.number, *self.lists, missing=missing)
        self.number += 1
        scale = self.scaler.get_scale() if self.scaler is not None else 1.0
        for params in self.lists:
            grads = [p.grad for p in params if p.grad is not None]
            for grad in grads:
                grad *= scale
            if bad:
                grads[1].view(-1)[2] = torch.inf
        self._in_eager(scale, bad)
        self.tail()
        if self.scaler is not None:
            self.scaler.update()
        assert_same(self.reference, *self.lists, self.mine)
        assert all(map(same_bits, *self.averages))

    def _in_eager(self, scale: float, bad: bool) -> None:
        theirs = self.lists[0]
        for p in theirs:
            if p.grad is not None:
                p.grad *= 1 / scale
        if "clip" in self.asked:
            torch.nn.utils.clip_grad_norm_(theirs, self.asked["clip"])
        if not bad:
            self.reference.step()
        if self.asked.get("averaged"):
            for average, p in zip(self.averages[0], theirs, strict=True):
                average.lerp_(p.detach(), 1 - 0.9)


ASKED: dict[str, dict[str, Any]] = {
    "clip": {"clip": 1.0},
    "unscale": {"scaled": True, "clip": 1.0},
    "judge, average": {"judged": True, "averaged": True, "clip": 1.0},
    "average": {"averaged": True, "zero": True},
}
#: Launches of a tail, whatever the format: without a norm or a flag there is one.
LAUNCHES = {"clip": 2, "unscale": 2, "judge, average": 2, "average": 1}
FORMATS = ("bf16", "fp16", "bf16-stochastic", "split", "8bit/64", "fp8-e4m3")
FORMATS += ("8bit-signed/128", "fp8-e5m2/64")
QUICK = {("fp8-e4m3", "unscale"), ("8bit/64", "judge, average")}


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        pytest.param(name, asked, marks=() if (name, asked) in QUICK else slow)
        for name in FORMATS
        for asked in ASKED
    ],
)
def test_bits_and_launches(name: str, asked: str) -> None:
    run = Run(name, options={"fallback": "error"}, **ASKED[asked])
    before = len(fuseopt.reports())
    for step in range(STEPS):
        run.step(bad=step == BAD and asked in ("unscale", "judge, average"))
    (report,) = fuseopt.reports()[before:]
    assert (report.fallback, report.launches) == ("", LAUNCHES[asked])


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param("ADOPT", "8bit/64", marks=slow),
        pytest.param("AdEMAMix", "bf16-stochastic", marks=slow),
        pytest.param("AdaBelief", "fp8-e4m3/64", marks=slow),
    ],
)
def test_optimizers_of_a_package(kind: str, name: str) -> None:
    run = Run(name, getattr(pytorch_optimizer, kind), judged=True, clip=1.0)
    for step in range(STEPS):
        run.step(bad=step == BAD)
    assert fuseopt.reports()[-1].launches == 2


# ---------------------------------------------------------------- events


@pytest.mark.slow
def test_steps_without_the_tail_between() -> None:
    """Both have the same packed state, in one dict of a parameter."""
    run = Run("8bit/64", clip=1.0)
    for step in range(6):
        run.step()
        if step % 2:
            give_grads(50 + step, *run.lists)
            run.reference.step()
            run.mine.step()
            assert_same(run.reference, *run.lists, run.mine)


@slow
def test_gradients_are_missing_and_come_late() -> None:
    run = Run("bf16-stochastic", clip=1.0)
    for step in range(8):
        run.step(missing=3 if step != 4 else 0)


@slow
def test_groups_are_added() -> None:
    run = Run("8bit/64", clip=1.0)
    run.step()
    run.step()
    more = [params_of(3, seed=1, sizes=SIZES) for _ in range(2)]
    both: tuple[Any, Any] = run.reference.optimizer, run.mine
    for of, params, new in zip(both, run.lists, more, strict=True):
        of.add_param_group({"params": new, "lr": 0.3})
        if params is not of.param_groups[0]["params"]:
            params += new
    run.averages = [[], []]
    run.step()
    run.step()


@pytest.mark.slow
def test_a_state_dict_is_loaded() -> None:
    run = Run("8bit/64", clip=1.0)
    run.step()
    run.step()
    run.mine.load_state_dict(fuseopt.full_precision(run.mine.state_dict()))
    for key, parts in run.reference.packed.items():
        form = fuseopt.storage.formats.FORMATS["8bit/64"]
        form.pack(form.unpack(parts), run.reference.packed[key])
    run.step()
    run.step()


CHANGES = [
    ("", "bf16"),
    pytest.param(("bf16", ""), marks=slow),
    pytest.param(("8bit/64", "split"), marks=slow),
]


@pytest.mark.slow
@pytest.mark.parametrize("names", CHANGES)
def test_the_storage_changes(names: tuple[str, str]) -> None:
    """A tail follows `fuseopt.compile` with another `storage`."""
    several = [params_of(6, sizes=SIZES) for _ in range(2)]
    tails: list[Any] = []
    optimizers = [torch.optim.AdamW(x, lr=1e-2) for x in several]
    for optimizer in optimizers:
        change(optimizer, names[0])
    tails = [fuseopt.tail(x, clip_grad_norm=1.0) for x in optimizers]
    for step in range(6):
        if step == 3:
            for optimizer in optimizers:
                change(optimizer, names[1])
        give_grads(step, *several)
        tails[1]()
        torch.nn.utils.clip_grad_norm_(several[0], 1.0)
        optimizers[0].step()
        for p, q in zip(*several, strict=True):
            assert same_bits(p, q)
            here, there = optimizers[0].state[p], optimizers[1].state[q]
            assert [*here] == [*there]
            assert all(map(same_bits, here.values(), there.values()))
            assert any(f"@{names[step > 2]}" in key for key in here) == bool(
                names[step > 2]
            )


def change(optimizer: Any, name: str) -> None:
    fuseopt.compile(optimizer, storage=Storage(name, least=0) if name else None)
