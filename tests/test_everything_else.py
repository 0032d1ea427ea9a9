"""What is no update goes elsewhere, a mixed graph in parts, and the report says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseopt
from fuseopt.backend import fuseopt as backend
from tests.steps import same_bits


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, options=options or None)


def places() -> list[tuple[str, str]]:
    """Where the parts of the only graph went."""
    (report,) = fuseopt.reports()
    return [(part.what, part.where) for part in report.parts]


def linear(seed: int = 0, n: int = 4) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(n, n)


def assert_same(mine: torch.nn.Module, reference: torch.nn.Module) -> None:
    pairs = zip(mine.state_dict().items(), reference.state_dict().values(), strict=True)
    for (name, a), b in pairs:
        assert same_bits(a, b), name


# ---------------------------------------------------------------- mixed graphs


def metric_and_update(model: Any, x: Tensor) -> Tensor:
    """A loss, and an update that does not use it, without recording."""
    with torch.no_grad():
        loss = torch.nn.functional.linear(x, model.weight, model.bias).square().mean()
        for p in model.parameters():
            p.mul_(0.99).add_(p.sign(), alpha=-0.01)
        return loss


def update_and_metric(model: Any, x: Tensor) -> Tensor:
    """The same, with a loss of what the update left."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99).add_(p.sign(), alpha=-0.01)
        return (x @ model.weight).square().mean()


def forward_and_update(model: Any, x: Tensor) -> Tensor:
    """A recorded forward, then the update of a moving average, in one graph."""
    out = model(x).tanh()
    with torch.no_grad():
        model.average.lerp_(model.weight, 0.1)
    return out


def update_by_the_forward(model: Any, x: Tensor) -> Tensor:
    """What a recorded forward gives is what the update writes."""
    out = model(x).tanh()
    with torch.no_grad():
        model.average.mul_(0.9).add_(out.detach()[:4] * 0.5, alpha=0.1)
    return out


MIXED: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "a metric before": (metric_and_update, ["before", "update"]),
    "a metric after": (update_and_metric, ["update", "after"]),
    "a recorded forward": (forward_and_update, ["before", "update"]),
    "an update by the forward": (update_by_the_forward, ["before", "update"]),
}


def runs(
    function: Callable[..., Tensor], calls: int = 3, **options: Any
) -> tuple[torch.nn.Module, torch.nn.Module, list[tuple[Tensor, Tensor]]]:
    """Run a function of a model and a batch compiled and in eager."""
    models = [linear(), linear()]
    for model in models:
        model.register_buffer("average", torch.zeros(4, 4))
    step = compiled(function, **options)
    results = []
    for call in range(calls):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(call))
        got, want = step(models[0], x), function(models[1], x)
        assert got.requires_grad == want.requires_grad
        results.append((got, want))
    return models[0], models[1], results


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_graph_in_eager_parts_has_eagers_bits(name: str) -> None:
    function, sides = MIXED[name]
    mine, reference, results = runs(function, fallback="eager")
    assert_same(mine, reference)
    for got, want in results:
        assert same_bits(got, want)
    where = ["fuseopt" if s == "update" else "eager" for s in sides]
    assert places() == list(zip(sides, where, strict=True))
    (report,) = fuseopt.reports()
    assert report.launches == 1
    assert not report.externs
    assert not report.fallback
    assert "before: eager" in str(report) or "after: eager" in str(report)


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_graph_in_inductors_parts(name: str) -> None:
    function, sides = MIXED[name]
    mine, reference, results = runs(function, fallback="inductor")
    for got, want in results:
        torch.testing.assert_close(got, want)
    if name != "an update by the forward":
        assert_same(mine, reference)
    where = ["fuseopt" if s == "update" else "inductor" for s in sides]
    assert places() == list(zip(sides, where, strict=True))


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_graph_is_refused_where_asked(name: str) -> None:
    models = [linear(), linear()]
    for model in models:
        model.register_buffer("average", torch.zeros(4, 4))
    step = compiled(MIXED[name][0], fallback="error")
    with pytest.raises(Exception, match="a part of the graph is no update"):
        step(models[0], torch.ones(5, 4))
    assert_same(models[0], models[1])


def test_backward_through_the_recorded_part() -> None:
    """Gradients flow through the part that Inductor compiled."""
    models = [linear(), linear()]
    for model in models:
        model.register_buffer("average", torch.zeros(4, 4))
    x = torch.randn(5, 4)
    step = compiled(forward_and_update, fallback="inductor")
    step(models[0], x).sum().backward()
    forward_and_update(models[1], x).sum().backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
