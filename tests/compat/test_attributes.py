"""What a step writes to its optimizer's attributes and groups is there afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt
from tests.versions import sets_no_attribute


class Counts(Optimizer):
    """Divides its rate by an attribute that each step counts up."""

    def __init__(self, params: Any) -> None:
        self.count = 0
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / self.count)


class Decays(Counts):
    """Changes a number of its own, which is a float."""

    def __init__(self, params: Any) -> None:
        self.rate = 0.5
        super().__init__(params)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        self.rate = self.rate * 0.9
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.rate)


class Makes(Counts):
    """Has an attribute from its first step on, which later ones read."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        known = hasattr(self, "scale")
        self.scale = 0.5 if known else 1.0
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.scale * group["lr"])


class Removes(Counts):
    """Gives up an attribute in its first step."""

    def __init__(self, params: Any) -> None:
        self.first = True
        super().__init__(params)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        factor = 2.0
        if hasattr(self, "first"):
            factor = 1.0
            del self.first
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-factor * group["lr"])


class Reads(Counts):
    """Keeps a number that it read from its tensors."""

    def __init__(self, params: Any) -> None:
        self.largest = 0.0
        super().__init__(params)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    self.largest = max(self.largest, p.grad.abs().max().item())


def compiled(opt: Optimizer) -> Callable[[], Any]:
    return torch.compile(opt.step, backend="fuseopt")


def alone(opt: Optimizer) -> Callable[[], Any]:
    return fuseopt.compile(opt).step


def held(opt: Optimizer) -> dict[str, Any]:
    own = {k: v for k, v in vars(opt).items() if isinstance(v, (int, float, str))}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in opt.param_groups]
    return {**own, "groups": groups}


@sets_no_attribute
@pytest.mark.family(20)
@pytest.mark.parametrize("way", [compiled, alone])
@pytest.mark.parametrize("n", [3, 20])
@pytest.mark.parametrize("kind", [Counts, Decays, Makes, Removes, Reads])
def test_attributes_that_a_step_writes(
    kind: type[Counts], n: int, way: Callable[[Optimizer], Callable[[], Any]]
) -> None:
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(5)) for _ in range(n)]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    opt, plain = kind(ours), kind(theirs)
    step = way(opt)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(5)
            q.grad = p.grad.clone()
        step()
        plain.step()
        assert held(opt) == held(plain)
        assert all(map(torch.equal, ours, theirs))
    assert any(report.launches for report in fuseopt.reports())
