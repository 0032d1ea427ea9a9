"""What is no update goes elsewhere, a mixed graph in parts, and the report says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
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


# ---------------------------------------------------------------- whole graphs


def test_a_forward_that_counts_its_batches_goes_to_inductor() -> None:
    """Batch norm writes buffers; that alone makes no update of a graph."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        norm = torch.nn.BatchNorm1d(4)
        models.append(torch.nn.Sequential(torch.nn.Linear(4, 4), norm, torch.nn.ReLU()))
    step = compiled(models[0])
    x = torch.randn(6, 4)
    got, want = step(x), models[1](x)
    torch.testing.assert_close(got, want)
    got.sum().backward()
    want.sum().backward()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for (name, a), b in zip(
        models[0].state_dict().items(), models[1].state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, msg=name)
    (report,) = fuseopt.reports()
    assert "It runs in inductor: autograd records this graph" in report.fallback


def test_in_place_activations_without_recording_are_no_update() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True))
    step = compiled(model, fallback="eager")
    with torch.no_grad():
        x = torch.randn(6, 4)
        assert same_bits(step(x), model(x))
    (report,) = fuseopt.reports()
    assert "changes no tensor that existed before it" in report.fallback


def test_a_recorded_write_runs_as_it_is() -> None:
    """An update that is differentiated itself: eager, with its gradients."""

    def step(w: Tensor, p: Tensor, lr: Tensor) -> Tensor:
        p.sub_(lr * w)
        return p

    results = []
    for function in (compiled(step), step):
        w, lr = torch.ones(3), torch.tensor(0.1, requires_grad=True)
        out = function(w, torch.zeros(3), lr)
        out.sum().backward()
        results.append((out.detach(), lr.grad))
    assert all(same_bits(a, b) for a, b in zip(*results, strict=True))
    (report,) = fuseopt.reports()
    assert "autograd records what this graph writes" in report.fallback


def test_a_record_that_nobody_can_go_back_through_is_no_forward() -> None:
    """A step without no_grad, on `.data`, that reads a norm of the parameter."""

    def step(params: list[Any]) -> None:
        for p in params:
            p.data.mul_(1 - 0.1 * 0.5).sub_(p.grad / p.abs().max())

    runs = []
    for function in (compiled(step), step):
        params = [torch.nn.Parameter(torch.linspace(1, 2, 5)) for _ in range(3)]
        for p in params:
            p.grad = torch.linspace(-1, 1, 5)
        function(params)
        runs.append(params)
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    (report,) = fuseopt.reports()
    assert not report.fallback


@pytest.mark.parametrize(
    "name", ["random on both sides", "a change of what another part made", "between"]
)
def test_what_cannot_be_split_stays_whole(name: str) -> None:
    """Splitting would draw random numbers in another order, or reorder writes."""

    def drawn(w: Tensor, p: Tensor) -> Tensor:
        loss = (w @ torch.rand(4, 4)).sum()
        p.add_(torch.rand(4, 4))
        return loss

    def shared(w: Tensor, p: Tensor) -> Tensor:
        out = w @ w
        p.add_(out * 0.5)
        out.mul_(2.0)
        return out

    def between(w: Tensor, p: Tensor) -> Tensor:
        p.add_(w)
        out = p @ w
        p.add_(w)
        return out

    function = {"r": drawn, "a": shared, "b": between}[name[0]]
    runs = []
    for step in (compiled(function), function):
        torch.manual_seed(1)
        w, p = torch.full((4, 4), 0.3), torch.zeros(4, 4)
        with torch.no_grad():
            runs.append([step(w, p), step(w, p), p])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    (report,) = fuseopt.reports()
    assert report.launches >= 1
    if name[0] == "r":
        (part,) = report.parts
        assert "draw random numbers in turn" in part.why


# ---------------------------------------------------------------- NumPy


def numpy_cosine(optimizer: Any, t: int) -> None:
    """A schedule in NumPy inside the compiled function."""
    lr = 0.1 * 0.5 * (1 + np.cos(np.pi * t / 10))
    for group in optimizer.param_groups:
        group["lr"] = lr
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def numpy_then_step(optimizer: Any, t: int) -> None:
    """The same with a step that Dynamo gives a graph of its own."""
    lr = 0.1 * 0.5 * (1 + np.cos(np.pi * np.float64(t) / 10))
    for group in optimizer.param_groups:
        group["lr"] = float(lr)
    optimizer.step()


def numpy_layerwise(optimizer: Any, t: int) -> None:
    """An array of rates, one per parameter, and a constant tensor."""
    params = optimizer.param_groups[0]["params"]
    rates = np.linspace(0.1, 0.01, len(params)) * 0.5 * (1 + np.cos(np.pi * t / 10))
    rates = torch.from_numpy(rates)
    decay = torch.tensor([0.9, 0.8, 0.7])
    with torch.no_grad():
        for i, p in enumerate(params):
            p.mul_(decay[i]).sub_(p.grad * rates[i])


@pytest.mark.parametrize("function", [numpy_cosine, numpy_then_step, numpy_layerwise])
def test_a_schedule_in_numpy(function: Callable[..., None]) -> None:
    runs = []
    for step in (compiled(function), function):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((4, 3), (5,), (2, 2))]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True)
        for t in range(5):
            for p in params:
                p.grad = torch.randn(p.shape)
            step(optimizer, t)
        runs.append(params)
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    updates = [r for r in fuseopt.reports() if not r.fallback]
    assert updates
    assert all(r.launches <= 2 for r in updates)
    for report in fuseopt.reports():
        assert not report.fallback or "computes only numbers" in report.fallback
