"""Tails of masters: unscale, clip and step in one kernel, from gradients of 16 bits.

The meaning is that of eager: widen each gradient to float32, unscale, clip, step the
masters, round them to the parameters.
"""

from __future__ import annotations

import io
from typing import Any

import lion_pytorch
import pytest
import torch

import fuseopt
from fuseopt import Storage
from fuseopt.errors import FuseoptError, UnsupportedInput
from fuseopt.offload import CPUOffloadOptimizer, MasterOptimizer
from tests.offload.test_masters import rounded
from tests.storage.reference import Reference, give_grads, params_of, same_bits

slow = pytest.mark.slow
BF16, FP16 = torch.bfloat16, torch.float16
SIZES = ((5, 8), (16,), (37,), ())
STRICT = {"fallback": "error"}


class Tail:
    """Masters that are stepped by hand, and a tail of an optimizer with masters."""

    def __init__(
        self,
        kind: str = "fp32",
        dtype: torch.dtype = BF16,
        make: Any = torch.optim.AdamW,
        storage: str = "",
        n: int = 6,
        scaled: bool = False,
        averaged: bool = False,
        options: dict[str, Any] = STRICT,
        of: Any = MasterOptimizer,
        **asked: Any,
    ) -> None:
        self.kind, self.dtype, self.number = kind, dtype, 0
        self.theirs = params_of(n, dtype=dtype, sizes=SIZES)
        self.ours = params_of(n, dtype=dtype, sizes=SIZES)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.theirs]
        self.reference = Reference(make(self.masters, lr=1e-2), storage or {})
        self.mine = of(
            self.ours,
            make,
            master=kind,
            storage=Storage(storage, least=0) if storage else None,
            lr=1e-2,
        )
        self.averages = [[m.detach().clone() for m in self.masters] for _ in range(2)]
        self.scalers = [
            torch.amp.GradScaler("cpu", init_scale=8, growth_interval=2)
            for _ in range(2 * scaled)
        ]
        for scaler in self.scalers:
            scaler.scale(torch.zeros(1))
        self.averaged, self.asked = averaged, asked
        self.tail = fuseopt.tail(
            self.mine,
            scaler=self.scalers[1] if scaled else None,
            ema=[(self.averages[1], 0.9)] if averaged else (),
            **asked,
            **options,
        )

    def step(self, bad: bool = False, missing: int = 0) -> Any:
        """One tail; `bad`: with a gradient that is not finite."""
        lists = self.theirs, self.ours
        give_grads(self.number, *lists, missing=missing)
        self.number += 1
        for params in lists:
            grads = [p.grad for p in params if p.grad is not None]
            for grad in grads:
                grad *= self.scalers[0].get_scale() if self.scalers else 1.0
            if bad:
                grads[1].view(-1)[0] = torch.inf
        kept = [None if p.grad is None else p.grad.clone() for p in self.ours]
        norm = self._in_eager()
        outcome = self.tail()
        if self.scalers:
            self.scalers[1].update()
            assert self.scalers[0].get_scale() == self.scalers[1].get_scale()
        assert norm is None or same_bits(norm, outcome.norm)
        self._check_grads(kept)
        self.check()
        return outcome

    def _check_grads(self, kept: list[Any]) -> None:
        """Nothing but zeros is written to gradients of 16 bits."""
        zero = self.asked.get("zero_grad", False)
        for p, grad in zip(self.ours, kept, strict=True):
            if zero is True or grad is None:
                assert p.grad is None
            else:
                want = torch.zeros_like(grad) if zero else grad
                assert p.grad is not None
                assert same_bits(want, p.grad)

    def _in_eager(self) -> Any:
        for p, master in zip(self.theirs, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
        asked, norm = self.asked, None
        grads = [m.grad for m in self.masters if m.grad is not None]
        if "grad_divisor" in asked:
            torch._foreach_div_(grads, asked["grad_divisor"])
        found, optimizer = False, self.reference.optimizer
        if self.scalers:
            self.scalers[0].unscale_(optimizer)
            state = self.scalers[0]._per_optimizer_states[id(optimizer)]
            found = any(x.item() for x in state["found_inf_per_device"].values())
        if "clip_grad_norm" in asked:
            limit = asked["clip_grad_norm"]
            norm = torch.nn.utils.clip_grad_norm_(self.masters, limit)
        if "clip_grad_value" in asked:
            torch.nn.utils.clip_grad_value_(self.masters, asked["clip_grad_value"])
        judged = asked.get("skip_nonfinite") and not torch.isfinite(norm)
        if not found and not judged:
            self.reference.step()
        if self.scalers:
            self.scalers[0].update()
        if self.averaged:
            sources = [m.detach() for m in self.masters]
            torch._foreach_lerp_(self.averages[0], sources, 1 - 0.9)
        return norm

    def check(self) -> None:
        pairs = zip(self.masters, self.ours, self.mine._masters.every, strict=True)
        for i, (master, mine, held) in enumerate(pairs):
            want = rounded(master.detach(), self.kind, self.dtype)
            assert same_bits(want, mine), f"parameter {i}"
            assert same_bits(master, held.wide()), f"master {i}"
            assert held.split != bool(held.master.untyped_storage().nbytes())
            state = self.mine.state.get(mine, {})
            content = self.reference.content(master)
            assert [*content] == [*state]
            for key, value in content.items():
                assert same_bits(value, state[key]), f"state {i} {key}"
        assert all(map(same_bits, *self.averages))


ASKED: dict[str, dict[str, Any]] = {
    "clip": {"clip_grad_norm": 1.0},
    "unscale": {"scaled": True},
    "unscale, clip": {"scaled": True, "clip_grad_norm": 1.0, "zero_grad": True},
    "divide, judge, average": {
        "grad_divisor": 3.0,
        "clip_grad_norm": 1.0,
        "skip_nonfinite": True,
        "averaged": True,
        "zero_grad": "zeros",
    },
    "values": {"clip_grad_value": 0.5},
}
KINDS = {"fp32": ("fp32", BF16), "split": ("split", BF16), "fp16": ("fp32", FP16)}
QUICK = {("fp16", "unscale, clip", ""), ("split", "clip", "bf16")}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else slow)
    for case in [
        *((kind, asked, "") for kind in KINDS for asked in ASKED),
        ("split", "clip", "bf16"),
        ("fp16", "unscale, clip", "8bit/64"),
        ("split", "unscale, clip", "bf16-stochastic"),
    ]
]


@pytest.mark.parametrize(("kind", "asked", "storage"), CASES)
def test_bits_and_launches(kind: str, asked: str, storage: str) -> None:
    tail = Tail(*KINDS[kind], storage=storage, **ASKED[asked])
    tail.step()  # makes the state
    before = len(fuseopt.reports())
    for step in range(1, 7):
        tail.step(bad=step in (3, 6) and ("unscale" in asked or "judge" in asked))
    (report,) = fuseopt.reports()[before:]
    assert report.fallback == ""
    assert report.launches == 1 + (asked != "values")


#: Bytes an element of AdamW's step (see test_masters), whatever it multiplies by. A
#: step that may be skipped also reads the parameter that it would write.
BYTES = {("fp32", BF16): 28, ("split", BF16): 26, ("fp32", FP16): 30}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [pytest.param(*x, marks=slow if x[0] == "split" else ()) for x in BYTES],
)
def test_no_pass_over_gradients_is_added(kind: str, dtype: torch.dtype) -> None:
    """The norm reads 2 bytes an element. The step moves what it moves by itself."""
    scaled = dtype == FP16
    tail = Tail(kind, dtype, scaled=scaled, clip_grad_norm=1.0, n=8)
    for _ in range(3):
        tail.step()
    norm, step = fuseopt.reports()[-1].kernels
    n = sum(p.numel() for p in tail.ours)
    # beside the gradients: a norm of each, a norm of all, flags and factors
    assert 2 * n <= norm.bytes <= 2 * n + 8 * len(tail.ours)
    assert {x.bytes_per_element for x in step.bodies} == {BYTES[kind, dtype]}


@slow
@pytest.mark.parametrize("make", [torch.optim.SGD, lion_pytorch.Lion])
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_other_optimizers(kind: str, make: Any) -> None:
    tail = Tail(kind, make=make, scaled=True, clip_grad_norm=0.5)
    for step in range(6):
        tail.step(bad=step == 4)
    assert fuseopt.reports()[-1].launches == 2


# ---------------------------------------------------------------- events


@slow
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_the_first_step_is_skipped(kind: str) -> None:
    """Then there is no state yet, and masters stay as they are."""
    tail = Tail(kind, scaled=True, clip_grad_norm=1.0)
    outcome = None
    for step in range(5):
        outcome = tail.step(bad=step < 2)
        assert bool(outcome.skips[0]) == (step < 2)
        assert bool(tail.mine.state) == (step >= 2)
    assert outcome is not None


@slow
def test_gradients_are_missing() -> None:
    tail = Tail("split", clip_grad_norm=1.0, n=9)
    tail.step()
    tail.step()
    before = len(fuseopt.reports())
    for _ in range(9):
        tail.step(missing=3)
    assert len(fuseopt.reports()) - before <= 3
    assert not any(x.fallback for x in fuseopt.reports()[before:])


@slow
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_numbers_and_steps_between(kind: str) -> None:
    """A limit, a rate, plain steps, and code that replaces gradients."""
    tail = Tail(kind, clip_grad_norm=1.0)
    for step in range(8):
        tail.asked["clip_grad_norm"] = tail.tail.clip_grad_norm = 2.0 / (1 + step)
        for x in (tail.mine, tail.reference.optimizer):
            x.param_groups[0]["lr"] = 0.1 / (1 + step)
        tail.step()
        if step % 3 == 2:
            give_grads(90 + step, tail.theirs, tail.ours)
            for p, master in zip(tail.theirs, tail.masters, strict=True):
                master.grad = p.grad.float()  # type: ignore[union-attr]
            tail.reference.step()
            tail.mine.step()
            tail.check()


@slow
def test_a_checkpoint_between() -> None:
    tail = Tail("split", storage="bf16-stochastic", clip_grad_norm=1.0)
    for step in range(6):
        tail.step()
        if step == 2:
            file = io.BytesIO()
            torch.save(tail.mine.state_dict(), file)
            file.seek(0)
            tail.mine.load_state_dict(torch.load(file))


@slow
def test_the_order_of_the_norm_and_schedules() -> None:
    tail = Tail("fp32", clip_grad_norm=1.0, clip_parameters=None)
    backwards = tail.ours[::-1]
    tail.tail = None
    tail.tail = fuseopt.tail(
        tail.mine, clip_grad_norm=1.0, clip_parameters=backwards, **STRICT
    )
    tail.masters.reverse()
    eager = tail._in_eager

    def in_eager() -> Any:
        tail.masters.reverse()
        for p, master in zip(tail.theirs, tail.masters, strict=True):
            master.grad = p.grad.float()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(tail.masters[::-1], 1.0)
        tail.reference.step()
        return norm

    assert eager is not None
    tail._in_eager = in_eager  # type: ignore[method-assign]
    optimizers = tail.reference.optimizer, tail.mine
    schedules = [torch.optim.lr_scheduler.ExponentialLR(x, 0.5) for x in optimizers]
    for _ in range(4):
        tail.step()
        tail.masters.reverse()
        for schedule in schedules:
            schedule.step()


@slow
def test_weights_of_float32_beside() -> None:
    """They have no master: their gradient is clipped in memory, as in eager."""
    narrow, wide = params_of(3, dtype=BF16), params_of(3, 1)
    theirs = [torch.nn.Parameter(p.detach().float()) for p in narrow]
    theirs += [torch.nn.Parameter(p.detach().clone()) for p in wide]
    plain = torch.optim.AdamW(theirs, lr=0.01)
    mine = MasterOptimizer([*narrow, *wide], torch.optim.AdamW, lr=0.01)
    tail = fuseopt.tail(mine, clip_grad_norm=1.0, **STRICT)
    for step in range(4):
        give_grads(step, narrow)
        give_grads(50 + step, wide)
        for p, q in zip(theirs, (*narrow, *wide), strict=True):
            p.grad = q.grad.float().clone()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        plain.step()
        assert same_bits(norm, tail().norm)
        held = [x.master for x in mine._masters.every]
        for p, q in zip(theirs, (*held, *wide), strict=True):
            assert same_bits(p, q)
        for p, q in zip(theirs[3:], wide, strict=True):
            assert same_bits(p.grad, q.grad)


@slow
def test_hooks_run_around_a_step_in_pieces() -> None:
    tail = Tail("split", scaled=True, clip_grad_norm=1.0, options={})
    tail.step()
    tail.step()
    calls: list[int] = []
    tail.mine.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(3):
        tail.step(bad=step == 1)
    assert len(calls) == 2
    assert any("hooks run" in x.fallback for x in fuseopt.reports())


@slow
def test_a_step_that_raises_leaves_groups_and_masters() -> None:
    tail = Tail("split", clip_grad_norm=1.0, zero_grad=True)
    tail.step()

    def told_to(*_: Any) -> None:
        raise KeyError("told to")

    handle = tail.mine.register_step_pre_hook(told_to)
    give_grads(7, tail.theirs, tail.ours)
    tail.tail._options["fallback"] = "eager"
    with pytest.raises(KeyError):
        tail.tail()
    params = tail.mine.param_groups[0]["params"]
    assert all(p is q for p, q in zip(params, tail.ours, strict=True))
    assert all(p.grad is not None for p in tail.ours)
    handle.remove()
    tail.check()
    tail.step()


@slow
def test_on_the_cpu() -> None:
    tail = Tail(of=CPUOffloadOptimizer, scaled=True, clip_grad_norm=1.0)
    for step in range(4):
        tail.step(bad=step == 2)
    assert fuseopt.reports()[-1].launches == 2


# ---------------------------------------------------------------- what is refused


class Overrides(MasterOptimizer):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_what_is_refused() -> None:
    params = params_of(4, dtype=BF16)
    with pytest.raises(UnsupportedInput, match="Overrides: its class overrides step"):
        fuseopt.tail(Overrides(params, torch.optim.SGD, lr=0.1))
    mine = MasterOptimizer(params, torch.optim.SGD, lr=0.1)
    averages = [p.detach().float() for p in params]
    with pytest.raises(UnsupportedInput, match="averages masters of float32"):
        fuseopt.tail(mine, ema=[(averages, params, 0.9)])
    model = torch.nn.Linear(2, 2)
    pair = torch.optim.swa_utils.AveragedModel(model), model
    with pytest.raises(UnsupportedInput, match="averages masters of float32"):
        fuseopt.tail(mine, ema=[pair])
    tail = fuseopt.tail(mine, scaler=torch.amp.GradScaler("cpu", init_scale=8))
    tail.scaler.scale(torch.zeros(1))  # type: ignore[union-attr]
    with pytest.raises(UnsupportedInput, match="all gradients"):
        tail()
    with pytest.raises(FuseoptError, match="already has a tail"):
        fuseopt.tail(mine)
