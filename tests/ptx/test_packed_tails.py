"""Tails of packed state and of masters with the kernels of a GPU: the CPU's bits.

tests/storage and tests/offload compare the bits of the CPU with those of eager.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

import fuseopt
from fuseopt import Storage
from fuseopt.offload import MasterOptimizer
from tests.storage.reference import Params, params_of, same_bits

from .kernels import Log
from .test_storage import give_grads, momentum, there

slow = pytest.mark.slow
STEPS, BAD = 6, 3
#: Sums of norms have another order on a GPU, so a limit is one that no norm reaches,
#: or one that any element passes.
LIMITS: dict[str, dict[str, Any]] = {
    "norm": {"clip_grad_norm": 1e6},
    "value": {"clip_grad_value": 0.25},
}


class Pair:
    """A tail here, and the same one on the device."""

    def __init__(self, make: Any, dtypes: list[torch.dtype], **asked: Any) -> None:
        self.here = [params_of(4, k, dtype=x) for k, x in enumerate(dtypes)]
        self.there = [there(params) for params in self.here]
        self.scalers = [
            torch.amp.GradScaler(x, init_scale=8, growth_interval=2)
            for x in ("cpu", "sim")
        ]
        self.tails: list[Any] = []
        self.optimizers: list[list[Any]] = []
        for device, lists, scaler in zip(
            ("cpu", "sim"), (self.here, self.there), self.scalers, strict=True
        ):
            scaler.scale(torch.zeros(1, device=device))
            optimizers = [make(k, params) for k, params in enumerate(lists)]
            self.optimizers.append(optimizers)
            self.tails.append(
                fuseopt.tail(optimizers, scaler=scaler, fallback="error", **asked)
            )

    def step(self, number: int, bad: int | None = None) -> None:
        """One tail of each; `bad`: the optimizer whose gradient is not finite."""
        every = [[p for x in lists for p in x] for lists in (self.here, self.there)]
        give_grads(number, *every)
        if bad is not None:
            for lists in (self.here, self.there):
                lists[bad][1].grad.view(-1)[0] = torch.inf  # type: ignore[union-attr]
        outcomes = [tail() for tail in self.tails]
        for scaler in self.scalers:
            scaler.update()
        skips = [[bool(x) for x in outcome.skips] for outcome in outcomes]
        assert skips[0] == skips[1]
        assert skips[0] == [k == bad for k in range(len(self.here))]
        for p, q in zip(*every, strict=True):
            assert same_bits(p.detach(), q.detach().cpu())
        for a, b in zip(*self.optimizers, strict=True):
            states = zip(a.state.values(), b.state.values(), strict=True)
            for mine, other in states:
                assert [*mine] == [*other]
                for key, value in mine.items():
                    assert same_bits(value, _here(other[key])), key


def _here(x: Any) -> Any:
    return x.cpu() if isinstance(x, torch.Tensor) else x


def packed(name: str) -> Any:
    def make(k: int, params: Params) -> optim.Optimizer:
        storage = Storage(name, least=0)
        return fuseopt.compile(momentum(params), storage=storage)

    return make


def run(ptx: Log, pair: Pair, launches: int, bad: int) -> None:
    for step in range(STEPS):
        before = len(ptx.launches)
        pair.step(step, bad if step == BAD else None)
        if step:  # the first makes state, in eager
            assert len(ptx.launches) - before == launches
    assert not ptx.faults


@pytest.mark.parametrize("asked", [pytest.param("norm", marks=slow), "value"])
@pytest.mark.parametrize(
    "name",
    ["bf16-stochastic", *(pytest.param(x, marks=slow) for x in ("split", "8bit/64"))],
)
def test_one_optimizer(ptx: Log, name: str, asked: str) -> None:
    """Unscale, clip and skip in the launch of the step."""
    ptx.seed = 11
    run(ptx, Pair(packed(name), [torch.float32], **LIMITS[asked]), 2, 0)


@slow
def test_several_optimizers(ptx: Log) -> None:
    ptx.seed = 12
    pair = Pair(packed("bf16"), [torch.float32] * 2, **LIMITS["value"])
    run(ptx, pair, 3, 1)


@slow
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("fp32", torch.bfloat16), ("fp32", torch.float16), ("split", torch.bfloat16)],
)
def test_masters(ptx: Log, kind: str, dtype: torch.dtype) -> None:
    """Gradients of 16 bits with a scale, multiplied in the launch of the step."""
    ptx.seed = 13

    def make(k: int, params: Params) -> optim.Optimizer:
        return MasterOptimizer(params, momentum, master=kind)

    run(ptx, Pair(make, [dtype], **LIMITS["value"]), 2, 0)
