"""Lists of several dtypes: what a step decides for a group holds for one dtype."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import fuseopt
from tests.beside import WAYS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ByGroup(torch.optim.Optimizer):
    """Counts lanes with a momentum in each list that torch gives it."""

    def __init__(self, params: Iterable[Any], foreach: bool = True) -> None:
        super().__init__(params, {"lr": 0.1, "foreach": foreach})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            moments = [self.state[p].get("m") for p in params]
            every: Any = self._group_tensors_by_device_and_dtype(  # type: ignore[attr-defined]
                [params, grads, moments], with_indices=True
            )
            for (ps, gs, ms), places in every.values():
                new = [k for k, m in enumerate(ms) if m is None]
                for k in new:
                    ms[k] = torch.zeros_like(ps[k])
                    self.state[params[places[k]]]["m"] = ms[k]
                if new:
                    for m, g in zip(ms, gs, strict=True):
                        m.mul_(0.9).add_(g)
                else:
                    torch._foreach_mul_(ms, 0.9)
                    torch._foreach_add_(ms, gs)
                torch._foreach_add_(ps, ms, alpha=-group["lr"])


STEPS: dict[str, Any] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "nesterov": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, foreach=True
    ),
    "dampening": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.7, dampening=0.3, maximize=True, foreach=True
    ),
    "own": ByGroup,
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
}


def made(each: int) -> list[torch.nn.Parameter]:
    """So many parameters of each dtype."""
    torch.manual_seed(0)
    shapes = ([(3,), (), (4, 2), (33,)] * 2)[:each]
    values = [torch.randn(shape).to(dtype) for shape in shapes for dtype in DTYPES]
    return [torch.nn.Parameter(x) for x in values]


@pytest.mark.family(20)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("each", [1, 4, 8])
@pytest.mark.parametrize("kind", STEPS)
def test_each_dtype_decides_alone(kind: str, each: int, way: str) -> None:
    """Of one dtype some lanes have no momentum yet, of another all have one."""
    mine, theirs = made(each), made(each)
    optimizers = [STEPS[kind](params) for params in (mine, theirs)]
    step = WAYS[way](optimizers[0])
    rng = random.Random(each)
    for call in range(9):
        first = DTYPES[call % 4]
        for p, q in zip(mine, theirs, strict=True):
            # a dtype begins late, and lacks gradients now and then
            late = p.dtype == first and rng.random() < 0.4
            q.grad = None if late else torch.randn(q.shape).to(q.dtype)
            p.grad = copy.deepcopy(q.grad)
        optimizers[1].step()
        step()
        for p, q in zip(mine, theirs, strict=True):
            assert torch.equal(p, q), (call, p.dtype, p.shape)
            for key, value in optimizers[1].state.get(q, {}).items():
                other = optimizers[0].state[p][key]
                assert torch.equal(torch.as_tensor(other), torch.as_tensor(value))
    assert not [r for r in fuseopt.reports() if r.fallback]
