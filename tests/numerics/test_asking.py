"""Who asks whether it is being compiled: a step is told no, a model what is true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import fuseopt


class Asks(torch.nn.Module):
    """A model that can be traced only where it knows that it is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(3, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * (2.0 if torch.compiler.is_compiling() else 1.0)


class AsksToo(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for p in group["params"]:
                rate = 2.0 if torch.compiler.is_compiling() else 1.0
                p.sub_(p.grad, alpha=group["lr"] * rate)


@pytest.mark.slow
def test_a_model_is_told_that_it_is_compiled() -> None:
    model = Asks()
    x = torch.ones(2, 3)
    compiled = torch.compile(model, backend="fuseopt", fullgraph=True)
    assert torch.equal(compiled(x), 2 * model(x))


@pytest.mark.parametrize("first", [True, False], ids=["opt, model", "model, opt"])
def test_a_model_beside_an_optimizer_is_told_so_too(first: bool) -> None:
    model = Asks()
    opt = AsksToo(model.parameters())
    x = torch.ones(2, 3)

    def of_both(opt: Any, model: Any, x: Any) -> Any:
        return model(x) * opt.param_groups[0]["lr"]

    def of_model(model: Any, opt: Any, x: Any) -> Any:
        return model(x) * opt.param_groups[0]["lr"]

    function, given = (of_both, (opt, model)) if first else (of_model, (model, opt))
    compiled = torch.compile(function, backend="fuseopt")
    assert torch.equal(compiled(*given, x), model(x))


# a closure inside of what is compiled is compiled as well, and its model is told so
@pytest.mark.parametrize(
    ("way", "closure"),
    [
        ("compile", False),
        ("compile", True),
        ("backend", False),
        ("backend", True),
        ("inside", False),
    ],
)
def test_a_step_is_told_what_eager_is(way: str, closure: bool) -> None:
    models = [Asks(), Asks()]
    models[1].load_state_dict(models[0].state_dict())
    x = torch.ones(2, 3)
    for i, model in enumerate(models):
        opt: Any = AsksToo(model.parameters())
        step: Any = opt.step
        if i and way == "compile":
            step = fuseopt.compile(opt).step
        elif i and way == "backend":
            step = torch.compile(opt.step, backend="fuseopt")

        def loss(opt: Any = opt, model: Any = model) -> Any:
            opt.zero_grad()
            result = model(x).square().mean()
            result.backward()
            return result

        def call(step: Any = step, loss: Any = loss) -> None:
            if closure:
                step(loss)
            else:
                step()

        if i and way == "inside":
            call = torch.compile(call, backend="fuseopt")
        for _ in range(3):
            loss()
            call()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
