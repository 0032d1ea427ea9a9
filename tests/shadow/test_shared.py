"""What several parameters or optimizers have in common, and what eager alone allows."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

import fuseopt
from fuseopt.backend import fuseopt as backend

WAYS = [("torch.compile", 4), ("fuseopt.compile", 4), ("fuseopt.compile", 16)]


def params_of(lanes: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(3, 4)) for _ in range(lanes)]


def compiled(way: str, optimizer: Any) -> Any:
    if way == "torch.compile":
        return torch.compile(optimizer.step, backend=backend)
    return fuseopt.compile(optimizer).step if way else optimizer.step


# ---------------------------------------------------------------- one gradient for two

#: By letter, who has the gradient of parameter 0 in a step.
SHARES = {"-": [], "1": [1], "2": [2], "*": [1, 2, 3]}
OPTIONS: list[dict[str, Any]] = [
    {"momentum": 0.9, "foreach": True},
    {"momentum": 0.9, "foreach": False},
    {"foreach": False},
    # the gradient itself is changed: once for each that has it
    {"foreach": True, "weight_decay": 0.1, "maximize": True},
]


class Decayed(Optimizer):
    """Changes gradients in place, as eager does once for each that has one."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.add_(p, alpha=0.1)
                p.sub_(p.grad, alpha=group["lr"])


def stepped(make: Any, way: str, lanes: int, pattern: str) -> list[Tensor]:
    torch._dynamo.reset()
    params = params_of(lanes)
    optimizer = make(params)
    step = compiled(way, optimizer)
    generator = torch.Generator().manual_seed(1)
    left = []
    for letter in pattern:
        for p in params:
            p.grad = torch.randn(3, 4, generator=generator)
        for k in SHARES[letter]:
            params[k].grad = params[0].grad
        step()
        left += [p.detach().clone() for p in params]
        for k in SHARES[letter]:
            assert params[k].grad is params[0].grad, "the user's gradients are theirs"
    return left


@pytest.mark.family(40)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.parametrize("pattern", ["1-", "-1-", "12*-", "11", "--1"])
@pytest.mark.parametrize("case", [*range(len(OPTIONS)), "Decayed"])
def test_two_parameters_share_a_gradient_now_and_then(
    case: int | str, pattern: str, way: str, lanes: int
) -> None:
    def make(params: list[Tensor]) -> Optimizer:
        if isinstance(case, str):
            return Decayed(params)
        return SGD(params, lr=0.1, **OPTIONS[case])

    want = stepped(make, "", lanes, pattern)
    got = stepped(make, way, lanes, pattern)
    assert all(map(torch.equal, got, want))


# ---------------------------------------------------------------- one state for two


class Sharp(Optimizer):
    """Moves away, asks the closure, comes back, and lets another optimizer step. Both
    have one state.
    """

    def __init__(self, params: Any, base: Any, rho: float = 0.05, **options: Any):
        super().__init__(params, {"rho": rho, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    @torch.no_grad()
    def away(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=group["rho"])

    @torch.no_grad()
    def back(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "old" in self.state[p]:
                    p.copy_(self.state[p].pop("old"))
        self.base.step()

    @torch.no_grad()
    def step(self, closure: Any) -> None:  # type: ignore[override]
        self.away()
        with torch.enable_grad():
            closure()
        self.back()


def sharpened(way: str, lanes: int) -> tuple[list[Tensor], list[list[str]]]:
    torch._dynamo.reset()
    params = params_of(lanes)
    optimizer = Sharp(params, SGD, lr=0.1, momentum=0.9)
    step = compiled(way, optimizer)
    x = torch.randn(4, 2)

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        loss = torch.stack([((p @ x) ** 2).sum() for p in params]).sum() * 0.01
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(4):
        closure()
        step(closure)
    left = [p.detach() for p in params]
    left += [optimizer.state[p]["momentum_buffer"] for p in params]
    return left, [sorted(optimizer.state[p]) for p in params]


@pytest.mark.family(3)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
def test_optimizers_that_share_their_state(way: str, lanes: int) -> None:
    """The one that holds the other stays in eager, and the other is compiled."""
    want, keys = sharpened("", lanes)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got, mine = sharpened(way, lanes)
    assert mine == keys
    assert all(map(torch.equal, got, want))
    texts = [str(w.message) for w in told if "shares its state" in str(w.message)]
    assert len(texts) == 1
    assert "Sharp.step runs in eager" in texts[0]
    assert any("shares its state" in r.fallback for r in fuseopt.reports())
    assert any(r.launches for r in fuseopt.reports()), "the other is compiled"


# ---------------------------------------------------------------- inference mode


@pytest.mark.family(5)
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("way", "lanes"), WAYS)
def test_state_of_inference_mode_is_refused_outside(
    way: str, lanes: int, foreach: bool, later: bool
) -> None:
    """With eager's error, before anything is written; inside, it is written."""
    params = params_of(lanes)
    optimizer = SGD(params, lr=0.1, momentum=0.9, foreach=foreach)
    step = compiled(way, optimizer)
    for p in params:
        p.grad = torch.ones_like(p)
    if later:
        step()
    with torch.inference_mode():
        for p in params:
            optimizer.state[p]["momentum_buffer"] = torch.ones(3, 4)
    before = [p.detach().clone() for p in params]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            step()
        assert all(map(torch.equal, params, before))
    with torch.inference_mode():
        step()
    assert not any(map(torch.equal, params, before))
    for p in params:
        optimizer.state[p]["momentum_buffer"] = torch.ones(3, 4)
    step()


# ---------------------------------------------------------------- another dtype


@pytest.mark.family(3)
@pytest.mark.parametrize(("way", "lanes"), WAYS)
@pytest.mark.parametrize("options", OPTIONS[:3])
@pytest.mark.filterwarnings("ignore:.*runs in eager")
def test_a_parameter_changes_its_dtype_and_keeps_its_gradient(
    options: dict[str, Any], way: str, lanes: int
) -> None:
    def run(way: str) -> list[Tensor]:
        torch._dynamo.reset()
        params = params_of(lanes)
        optimizer = SGD(params, lr=0.1, **options)
        step = compiled(way, optimizer)
        generator = torch.Generator().manual_seed(1)
        for k in range(5):
            for p in params:
                if k < 3 or p is not params[2]:
                    p.grad = torch.randn(3, 4, generator=generator)
            if k == 3:
                params[2].data = params[2].data.double()
            step()
        return [p.detach() for p in params]

    want, got = run(""), run(way)
    assert [t.dtype for t in got] == [t.dtype for t in want]
    assert all(map(torch.equal, got, want))
