"""Masters of float32: the bits of cast, step, round, in one launch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.errors import UnsupportedInput
from fuseopt.offload import MasterOptimizer
from tests.storage.reference import (
    SIZES,
    Reference,
    give_grads,
    params_of,
    same_bits,
)

Make = Callable[..., Optimizer]
#: (optimizer, bytes an element with masters in float32)
CASES: dict[str, tuple[Make, dict[str, Any], int]] = {
    "AdamW": (torch.optim.AdamW, {}, 28),
    "SGD": (torch.optim.SGD, {}, 12),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, 20),
    "Lion": (lion_pytorch.Lion, {}, 20),
    "ADOPT": (pytorch_optimizer.ADOPT, {}, 28),
    "AdEMAMix": (pytorch_optimizer.AdEMAMix, {}, 36),
}


def rounded(master: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """What a parameter is, given its master."""
    if kind == "fp32":
        return master.to(dtype)
    high = (master.view(torch.int32) + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16)


class Pair:
    """Masters that are stepped by hand, and a MasterOptimizer."""

    def __init__(
        self,
        make: Make,
        kind: str,
        storage: Any = None,
        n: int = 18,
        dtype: torch.dtype = torch.bfloat16,
        sizes: Any = SIZES,
        **options: Any,
    ) -> None:
        self.kind, self.dtype, self.number = kind, dtype, 0
        self.theirs = params_of(n, dtype=dtype, sizes=sizes)
        self.ours = params_of(n, dtype=dtype, sizes=sizes)
        self.masters = [torch.nn.Parameter(p.detach().float()) for p in self.theirs]
        self.reference = Reference(
            make(self.masters, lr=1e-2, **options), storage or {}
        )
        self.optimizer = MasterOptimizer(
            self.ours, make, master=kind, storage=storage, lr=1e-2, **options
        )

    def step(self, times: int = 1, missing: int = 0) -> None:
        for _ in range(times):
            give_grads(self.number, self.theirs, self.ours, missing=missing)
            self.number += 1
            for p, master in zip(self.theirs, self.masters, strict=True):
                master.grad = None if p.grad is None else p.grad.float()
            self.reference.step()
            self.optimizer.step()
            self.check()

    def check(self) -> None:
        pairs = zip(self.masters, self.ours, self.optimizer._masters.every, strict=True)
        for i, (master, mine, held) in enumerate(pairs):
            want = rounded(master.detach(), self.kind, self.dtype)
            assert same_bits(want, mine), f"parameter {i}"
            assert same_bits(master, held.wide()), f"master {i}"
            state = self.optimizer.state.get(mine, {})
            content = self.reference.content(master)
            assert [*content] == [*state]
            for key, value in content.items():
                assert same_bits(value, state[key]), f"state {i} {key}"


@pytest.mark.family(24)
@pytest.mark.parametrize("n", [4, 18])
@pytest.mark.parametrize("kind", ["fp32", "split"])
@pytest.mark.parametrize("name", CASES)
def test_bits(name: str, kind: str, n: int) -> None:
    make, options, size = CASES[name]
    pair = Pair(make, kind, n=n, **options)
    pair.step(5)
    report = fuseopt.reports()[-1]
    assert report.fallback == ""
    assert report.launches == 1
    # the low half is read and written where the whole master was
    size -= 2 * (kind == "split")
    bodies = report.kernels[0].bodies
    assert max(x.bytes_per_element for x in bodies) == size


@pytest.mark.family(3)
@pytest.mark.parametrize("storage", ["bf16", "bf16-stochastic"])
@pytest.mark.parametrize("kind", ["fp32", "split"])
@pytest.mark.parametrize("name", ["AdamW", "Lion"])
def test_bits_with_packed_state(name: str, kind: str, storage: str) -> None:
    make, options, _ = CASES[name]
    pair = Pair(make, kind, storage, **options)
    pair.step(5)
    assert fuseopt.reports()[-1].fallback == ""


@pytest.mark.family(15)
@pytest.mark.parametrize("n", [4, 18])
@pytest.mark.parametrize("storage", [None, "bf16"])
@pytest.mark.parametrize("kind", ["fp32", "split"])
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_parameters_without_dimensions(
    name: str, kind: str, storage: str | None, n: int
) -> None:
    """A split master has no memory, also one of a single number."""
    make, options, _ = CASES[name]
    sizes = ((), (1,), (5,))
    pair = Pair(make, kind, storage, n=n, sizes=sizes, **options)
    pair.step(4)
    assert fuseopt.reports()[-1].fallback == ""


def test_float16() -> None:
    Pair(torch.optim.AdamW, "fp32", dtype=torch.float16).step(4)
    with pytest.raises(UnsupportedInput, match="no split master"):
        Pair(torch.optim.AdamW, "split", dtype=torch.float16)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_gradients_may_be_missing(name: str, kind: str) -> None:
    make, options, _ = CASES[name]
    pair = Pair(make, kind, **options)
    pair.step(3)
    before = len(fuseopt.reports())
    pair.step(9, missing=3)
    assert len(fuseopt.reports()) - before <= 1


@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_a_run_goes_on_from_a_file(kind: str) -> None:
    pair = Pair(torch.optim.AdamW, kind, "bf16-stochastic")
    pair.step(3)
    file = io.BytesIO()
    torch.save(pair.optimizer.state_dict(), file)
    file.seek(0)
    again = [torch.nn.Parameter(torch.zeros_like(p)) for p in pair.ours]
    resumed = MasterOptimizer(
        again, torch.optim.AdamW, master=kind, storage="bf16-stochastic", lr=1e-2
    )
    resumed.load_state_dict(torch.load(file))
    pair.ours, pair.optimizer = again, resumed
    pair.check()
    pair.step(3)


def test_one_kind_of_masters_loads_the_other() -> None:
    pair = Pair(torch.optim.AdamW, "fp32")
    pair.step(3)
    saved = copy.deepcopy(pair.optimizer.state_dict())
    pair.kind = "split"
    pair.ours = [torch.nn.Parameter(p.detach().clone()) for p in pair.ours]
    pair.optimizer = MasterOptimizer(
        pair.ours, torch.optim.AdamW, master="split", lr=1e-2
    )
    pair.optimizer.load_state_dict(saved)
    pair.check()
    pair.step(2)


def test_a_plain_state_dict_is_loaded() -> None:
    params = params_of(6)
    plain = torch.optim.AdamW(params, lr=1e-2)
    give_grads(0, params)
    plain.step()
    ours = [torch.nn.Parameter(p.detach().bfloat16()) for p in params]
    optimizer = MasterOptimizer(ours, torch.optim.AdamW, lr=1e-2)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    give_grads(1, ours)
    optimizer.step()
    for p, q in zip(params, ours, strict=True):
        assert optimizer.state[q]["step"] == plain.state[p]["step"] + 1


@pytest.mark.slow
def test_groups_and_schedules() -> None:
    pair = Pair(torch.optim.AdamW, "split")
    optimizers = pair.reference.optimizer, pair.optimizer
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] = 0.1
    pair.step(3)
    more = params_of(4, 1, torch.bfloat16), params_of(4, 1, torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in more[0]]
    pair.reference.optimizer.add_param_group({"params": masters, "lr": 0.3})
    pair.optimizer.add_param_group({"params": more[1], "lr": 0.3})
    pair.theirs += more[0]
    pair.ours += more[1]
    pair.masters += masters
    pair.step(3)
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for optimizer in optimizers
    ]
    for _ in range(3):
        pair.step()
        for schedule in schedules:
            schedule.step()
    assert pair.optimizer.param_groups[1]["params"] is not pair.masters


def test_the_groups_show_the_users_parameters() -> None:
    pair = Pair(torch.optim.AdamW, "fp32")
    pair.step(2)
    params = pair.optimizer.param_groups[0]["params"]
    assert all(p is q for p, q in zip(params, pair.ours, strict=True))
    pair.optimizer.zero_grad()
    assert all(p.grad is None for p in pair.ours)
    give_grads(9, pair.ours)
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    assert pair.optimizer.step(lambda: torch.tensor(2.0)) == 2.0


def test_gradients_that_stay_where_they_are() -> None:
    pair = Pair(torch.optim.AdamW, "fp32")
    pair.step(2)
    grads = [p.grad for p in pair.ours]
    pair.step(1)
    for p, grad in zip(pair.ours, grads, strict=True):
        assert grad is not None
        grad.copy_(p.grad)  # type: ignore[arg-type]
        p.grad = grad
    for p, master in zip(pair.ours, pair.masters, strict=True):
        master.grad = p.grad.float()  # type: ignore[union-attr]
    pair.reference.step()
    pair.optimizer.step()
    pair.check()


class Fails(torch.optim.SGD):
    """A step that cannot be traced, and raises where it is told to."""

    fails = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        total = sum(float(p.grad.norm()) for p in self.param_groups[0]["params"])
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.1 / (1 + total))
        if self.fails:
            raise KeyError("told to")


@pytest.mark.parametrize("kind", ["fp32", "split"])
def test_a_step_in_eager(kind: str) -> None:
    pair = Pair(Fails, kind)
    pair.step(1)
    with pytest.warns(RuntimeWarning, match="runs in eager"):
        pair.step(2)
    pair.optimizer.optimizer.fails = True
    with pytest.raises(KeyError):
        pair.optimizer.step()
    every = pair.optimizer._masters.every
    assert all(x.master.untyped_storage().nbytes() == 0 for x in every if x.split)
    assert all(x.master.grad is x.hollow for x in every)
    params = pair.optimizer.param_groups[0]["params"]
    assert all(p is q for p, q in zip(params, pair.ours, strict=True))


@pytest.mark.parametrize(
    ("param", "why"),
    [
        (torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(4, 3, dtype=torch.bfloat16).T, "strides"),
    ],
)
def test_what_has_no_master(param: torch.Tensor, why: str) -> None:
    with pytest.raises(UnsupportedInput, match=why):
        MasterOptimizer([torch.nn.Parameter(param)], torch.optim.SGD)


def test_a_wrong_kind() -> None:
    with pytest.raises(UnsupportedInput, match="'fp8'"):
        MasterOptimizer(
            params_of(2, dtype=torch.bfloat16), torch.optim.SGD, master="fp8"
        )
