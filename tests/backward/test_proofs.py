"""Buckets share one analysis of the step's code, and only where it sees the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from fuseopt.errors import UnsupportedInput
from fuseopt.replicate.driver import LedOptimizer
from tests.backward.pairs import Pair, model
from tests.backward.test_bits import adamw

#: Read by `Steered`; a hook of a backward changes it.
STEER = {"by": 1.0, "lane": -1}


class Steered(Optimizer):
    """Its step reads a table of its module, and once that says so, one lane's place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * STEER["by"])


class Anchored(Optimizer):
    """Its step reads a tensor that the optimizer holds."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.anchor: Any = torch.tensor(2.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad * self.anchor, alpha=-group["lr"])


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each proof that a bucket asked for."""
    asked: list[int] = []
    prove = LedOptimizer.prove

    def counted(self: LedOptimizer) -> Any:
        asked.append(self.calls)
        return prove(self)

    monkeypatch.setattr(LedOptimizer, "prove", counted)
    return asked


@pytest.mark.family(2)
@pytest.mark.parametrize("blocks", [6, 12])
def test_the_code_is_analysed_once_for_all_buckets(
    proofs: list[int], blocks: int
) -> None:
    pair = Pair(adamw, of=lambda: model(blocks))
    for _ in range(2):
        pair.step()
    # of kinds of buckets there are three, without state and with it
    assert len(proofs) <= 8


def halves() -> torch.nn.Sequential:
    """Layers of which every other one is bfloat16, the casts between them included."""
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for k in range(8):
        layers.append(Mixed(torch.bfloat16 if k % 2 else torch.float32))
    return torch.nn.Sequential(*layers)


class Mixed(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(6, 6, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x.to(self.dtype))).to(torch.float32)


@pytest.mark.parametrize("buckets", ["layer", 300])
def test_buckets_of_other_dtypes(buckets: Any) -> None:
    """Some have one dtype, others two, which the analysis tells apart."""
    pair = Pair(adamw, buckets, of=halves)
    for _ in range(3):
        pair.step()


def test_what_the_code_reads_changes_between_buckets() -> None:
    """Each bucket's step reads what holds when it runs."""
    pair = Pair(Steered, of=lambda: model(8))

    def steer(to: float) -> Any:
        return lambda *_: STEER.update(by=to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STEER, "by", 1.0)
        handles = [
            pair.mine[k].register_full_backward_hook(steer(float(k))) for k in (2, 5)
        ]
        pair.backward()
        for handle in handles:
            handle.remove()
        # of the gradients of a bucket all are there before its hook, or none
        for q, p in zip(pair.mine.parameters(), pair.theirs.parameters(), strict=True):
            assert p.grad is not None
            wanted = [p - 0.1 * by * p.grad for by in (1.0, 2.0, 5.0)]
            assert any(torch.allclose(q, x) for x in wanted)


def test_a_tensor_that_is_a_lane_of_one_bucket() -> None:
    """The optimizer holds a parameter: its bucket is not treated as the others are."""
    m = model(6)

    def build(params: Any) -> Optimizer:
        optimizer = Anchored(params)
        optimizer.anchor = m[3].scale
        return optimizer

    def train() -> None:
        fuseopt.in_backward(m, build, buckets="layer")
        m(torch.randn(3, 6)).square().mean().backward()

    with pytest.raises(UnsupportedInput, match="Anchored cannot step"):
        train()


def test_a_tensor_of_the_optimizer_that_is_no_lanes() -> None:
    pair = Pair(Anchored, of=lambda: model(8))
    for _ in range(3):
        pair.step()
