"""Pruned weights: a mask in the state is an operand of the step, in the same launch."""

from __future__ import annotations

from typing import Any

import pytest
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

SIZES = ((16, 32), (5, 64), (8, 8))
slow = pytest.mark.slow


def two_of_four(p: torch.Tensor) -> torch.Tensor:
    """Where the two largest of four neighbours are."""
    rows = p.detach().abs().view(-1, 4)
    chosen = torch.zeros_like(rows, dtype=torch.bool)
    return chosen.scatter_(1, rows.topk(2).indices, True).view_as(p)


class Pruned(torch.optim.Optimizer):
    """AdamW whose weights keep a pattern, and a copy of them in bfloat16."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                mask = two_of_four(p)
                p.data.mul_(mask)
                served = p.detach().bfloat16()
                self.state[p] = {
                    "mask": mask,
                    "served": served,
                    "mean": torch.zeros_like(p),
                    "square": torch.zeros_like(p),
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                root = state["square"].sqrt().add_(1e-8)
                p.addcdiv_(state["mean"], root, value=-group["lr"])
                p.mul_(state["mask"])
                state["served"].copy_(p)


@pytest.mark.parametrize("n", [6, pytest.param(18, marks=slow)])
@pytest.mark.parametrize("name", ["8bit/64", pytest.param("bf16", marks=slow), ""])
def test_a_mask_keeps_its_pattern(name: str, n: int) -> None:
    theirs, ours = params_of(n, sizes=SIZES), params_of(n, sizes=SIZES)
    reference = Reference(Pruned(theirs), name or {})
    storage = Storage(name, least=0) if name else None
    optimizer = fuseopt.compile(Pruned(ours), storage=storage)
    masks = [optimizer.state[p]["mask"].clone() for p in ours]
    for step in range(5):
        give_grads(step, theirs, ours)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)
    for p, mask in zip(ours, masks, strict=True):
        assert torch.equal(p != 0, mask)
        assert same_bits(optimizer.state[p]["served"], p.detach().bfloat16())
    report = fuseopt.reports()[-1]
    assert (report.launches, report.fallback) == (1, "")
