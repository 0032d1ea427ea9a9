"""Pruned weights: a mask in the state is an operand of the step, in the same launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.sparse import _semi_structured_conversions as conversions

import fuseopt
from fuseopt import Storage
from fuseopt.errors import UnsupportedInput
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


def packed_copy(p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and metadata of torch's format for 2 of 4, from torch's own function."""
    convert: Any = conversions.sparse_semi_structured_from_dense_cutlass
    values, meta = convert(p.detach().bfloat16())
    return values, meta


class Served(torch.optim.Optimizer):
    """Weights of 2 of 4, and the values of their packed copy. Which two are kept is
    fixed, so the metadata never change, and a value is one of four neighbours.
    """

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                mask = two_of_four(p)
                p.data.mul_(mask)
                values, meta = packed_copy(p)
                four = torch.arange(4).expand(p.shape[0], p.shape[1] // 4, 4)
                kept = four[mask.view_as(four)].view_as(values)
                self.state[p] = {
                    "mask": mask,
                    "mean": torch.zeros_like(p),
                    "first": kept[:, 0::2].to(torch.int32).contiguous(),
                    "second": kept[:, 1::2].to(torch.int32).contiguous(),
                    "values": values,
                    "meta": meta,
                }

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["mean"].lerp_(p.grad, 0.1)
                p.add_(state["mean"], alpha=-group["lr"]).mul_(state["mask"])
                a, b, c, d = p[:, 0::4], p[:, 1::4], p[:, 2::4], p[:, 3::4]
                for k, name in enumerate(("first", "second")):
                    at = state[name]
                    low, high = torch.where(at == 0, a, b), torch.where(at == 2, c, d)
                    value = torch.where(at < 2, low, high)
                    state["values"][:, k::2].copy_(value)


@pytest.mark.parametrize("name", ["", pytest.param("8bit/64", marks=slow)])
def test_the_packed_copy_is_refreshed(name: str) -> None:
    """Masked update in one launch; the values, which lie elsewhere, in a second one."""
    sizes = ((32, 64), (64, 128))
    theirs, ours = params_of(8, sizes=sizes), params_of(8, sizes=sizes)
    formats = {"mean": name} if name else {}
    reference = Reference(Served(theirs), formats)
    storage = [Storage(name, keys="mean", least=0)] if name else None
    optimizer = fuseopt.compile(Served(ours), storage=storage)
    before = [optimizer.state[p]["meta"].clone() for p in ours]
    for step in range(5):
        give_grads(step, theirs, ours)
        reference.step()
        optimizer.step()
        assert_same(reference, theirs, ours, optimizer)
    for p, meta in zip(ours, before, strict=True):
        values, new = packed_copy(p)
        assert same_bits(values, optimizer.state[p]["values"])
        assert same_bits(meta, new)
        assert same_bits(meta, optimizer.state[p]["meta"])
    report = fuseopt.reports()[-1]
    assert (report.launches, report.fallback) == (2, "")


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")
def test_a_packed_parameter_is_refused() -> None:
    """torch steps no such parameter either: it has no in-place op."""
    values, meta = packed_copy(params_of(1, sizes=((64, 64),))[0])
    rest: Any = dict.fromkeys(
        ("packed_t", "meta_t", "compressed_swizzled_bitmask"), None
    )
    kind: Any = torch.sparse.SparseSemiStructuredTensorCUTLASS
    packed = kind(torch.Size((64, 64)), packed=values, meta=meta, **rest)
    params = [*params_of(1), torch.nn.Parameter(packed)]
    with pytest.raises(UnsupportedInput, match="parameter 1 of AdamW is a SparseSemi"):
        fuseopt.compile(torch.optim.AdamW(params), storage="bf16")
