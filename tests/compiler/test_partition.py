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
from fuseopt.compiler.session import session
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


@pytest.mark.family(4)
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
    with pytest.raises(Exception, match="a part of the graph is not an update"):
        step(models[0], torch.ones(5, 4))
    assert_same(models[0], models[1])


class Later(torch.optim.Optimizer):
    """State that a product makes, and that no write of the same step reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["before"] = torch.zeros(4, 4)
            state["before"].lerp_(p.grad @ p.grad.mT, 0.05)
            p.sub_(p.grad, alpha=0.1)
            state["after"] = p @ p.mT


def test_state_that_no_write_reads_is_a_part_of_the_update() -> None:
    """Inductor once computed it, whose bits are not eager's."""
    made: list[Any] = []
    for compile_it in (False, True):
        params = [torch.nn.Parameter(linear(i).weight.detach()) for i in range(2)]
        for p in params:
            p.grad = p.detach().flip(0)
        optimizer = Later(params)
        step = compiled(optimizer.step, fallback="error") if compile_it else None
        for _ in range(3):
            (step or optimizer.step)()
        made.append(
            [*params, *(t for p in params for t in optimizer.state[p].values())]
        )
    assert all(same_bits(a, b) for a, b in zip(*made, strict=True))
    assert all(not r.fallback and not r.parts for r in fuseopt.reports())


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
    assert "autograd records the writes of this graph" in report.fallback


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


# Dynamo computes numpy's cos as torch does: a function with it in one graph with its
# step runs in eager
@pytest.mark.filterwarnings("ignore:.*Dynamo computes numpy's:RuntimeWarning")
@pytest.mark.family(3)
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
    assert bool(updates) == (function is numpy_then_step)
    assert all(r.launches <= 2 for r in updates)
    expected = "computes only numbers", "computes numpy's"
    for report in fuseopt.reports():
        assert not report.fallback or any(x in report.fallback for x in expected)


# ---------------------------------------------------------------- higher-order ops


def test_an_update_that_needs_a_branch_runs_in_eager() -> None:
    def step(p: Tensor, g: Tensor) -> None:
        p.sub_(torch.cond(g.sum() > 0, lambda g: g * 2, lambda g: g * 3, (g,)))

    def run(function: Any) -> Tensor:
        p, g = torch.zeros(4), torch.linspace(-1, 2, 4)
        with torch.no_grad():
            function(p, g)
            function(p, -g)
        return p

    with pytest.warns(RuntimeWarning, match="a step runs in eager"):
        got = run(compiled(step))
    assert same_bits(got, run(step))
    (report,) = fuseopt.reports()
    assert "a higher-order op (cond)" in report.fallback


def test_a_branch_that_the_update_does_not_need_is_a_part() -> None:
    def step(p: Tensor, g: Tensor) -> Tensor:
        p.sub_(g * 2)
        return torch.cond(g.sum() > 0, torch.sin, torch.cos, (g,))

    runs = []
    for function in (compiled(step, fallback="eager"), step):
        p, g = torch.zeros(4), torch.linspace(-1, 2, 4)
        with torch.no_grad():
            runs.append([function(p, g), function(p, -g), p])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    assert places() == [("update", "fuseopt"), ("after", "eager")]


def test_a_checkpointed_forward_beside_an_update() -> None:
    from torch.utils.checkpoint import checkpoint

    def step(model: Any, average: Tensor, x: Tensor) -> Tensor:
        out = checkpoint(lambda x: model(x).tanh(), x, use_reentrant=False)
        with torch.no_grad():
            average.lerp_(model.weight, 0.1)
        return out

    runs = []
    for function in (compiled(step, fallback="eager"), step):
        model, average = linear(), torch.zeros(4, 4)
        out = function(model, average, torch.ones(2, 4))
        out.sum().backward()
        runs.append([out.detach(), average, model.weight.grad])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    assert places() == [("before", "eager"), ("update", "fuseopt")]


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_run_in_eager(transform: str) -> None:
    """Their levels are global state: a graph with them is not begun and left."""

    def by_grad(p: Tensor, g: Tensor) -> None:
        p.sub_(torch.func.grad(lambda w: (g @ w).square().sum())(p))

    def by_vmap(p: Tensor, g: Tensor) -> None:
        p.sub_(torch.vmap(lambda row: row / row.norm())(g))

    step = by_grad if transform == "grad" else by_vmap

    def run(function: Any) -> Tensor:
        p, g = torch.ones(3, 3), torch.linspace(1, 2, 9).view(3, 3)
        with torch.no_grad():
            function(p, g)
        return p

    with pytest.warns(RuntimeWarning, match="eager, because .* with a transform"):
        got = run(compiled(step))
    assert same_bits(got, run(step))
    (report,) = fuseopt.reports()
    assert "written with a transform" in report.fallback


def test_a_graph_that_calls_a_module() -> None:
    """Made by hand: Dynamo inlines modules. The update beside the call is compiled."""

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear()

    graph = torch.fx.Graph()
    p, x = graph.placeholder("p"), graph.placeholder("x")
    p.meta["example_value"], x.meta["example_value"] = torch.ones(4), torch.ones(2, 4)
    out = graph.call_module("layer", (x,))
    out.meta["example_value"] = torch.ones(2, 4)
    graph.call_method("mul_", (p, 0.5)).meta["example_value"] = p.meta["example_value"]
    graph.output((out,))
    gm = torch.fx.GraphModule(Root(), graph)
    with torch.no_grad():
        run = backend(
            gm, [torch.ones(4), torch.ones(2, 4)], options={"fallback": "eager"}
        )
        mine, x_now = torch.ones(4), torch.randn(2, 4)
        (got,) = run(mine, x_now)
        assert same_bits(got, gm.layer(x_now))
    assert same_bits(mine, torch.full((4,), 0.5))
    assert places() == [("before", "eager"), ("update", "fuseopt")]


# ---------------------------------------------------------------- training


class Attention(torch.nn.Module):
    """One head of attention, a norm and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)
        self.norm = torch.nn.LayerNorm(8)
        self.out = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed)


class Cube(torch.autograd.Function):
    """x**3, with a gradient that is not its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 2.0 * x


class Custom(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return Cube.apply(self.layer(x))


def train(make: Callable[[], Any], where: str | None, steps: int = 3) -> Any:
    """Train a model; with `where` the model and the step are both compiled."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    forward, step = model, optimizer.step
    if where is not None:
        forward, step = compiled(model, fallback=where), compiled(step, fallback=where)
    losses = []
    for i in range(steps):
        x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(i))
        loss = forward(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        step()
        losses.append(loss.detach())
    return model, losses


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (Attention, "eager"),
        (Custom, "eager"),
        (Custom, "inductor"),
        pytest.param(Attention, "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_model_and_its_step_are_trained(make: Callable[[], Any], where: str) -> None:
    """Attention, a function with a gradient of its own: the model elsewhere, the
    update here."""
    model, losses = train(make, where)
    reference, expected = train(make, None)
    if where == "eager":
        assert_same(model, reference)
    torch.testing.assert_close(losses, expected)
    forwards = [r for r in fuseopt.reports() if r.fallback]
    assert len(forwards) == 1
    assert f"It runs in {where}: autograd records this graph" in forwards[0].fallback
    updates = [r for r in fuseopt.reports() if not r.fallback]
    assert updates
    assert all(r.launches == 1 and not r.externs for r in updates)


def test_a_whole_train_step_in_one_function() -> None:
    """Forward, backward and step: Dynamo makes graphs of it, each goes where it can."""

    def step(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    runs = []
    for function in (compiled(step, fallback="eager"), step):
        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, foreach=True)
        for i in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(i))
            loss = function(model, optimizer, x)
        runs.append([loss.detach(), *model.state_dict().values()])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    kinds = [r.launches if not r.fallback else 0 for r in fuseopt.reports()]
    assert 0 in kinds
    assert 1 in kinds


def clip_step_average(optimizer: Any, params: list[Any], average: list[Tensor]) -> None:
    """Clip, step and a moving average: one graph, since nothing breaks it."""
    with torch.no_grad():
        torch.nn.utils.clip_grad_norm_(params, 0.5)
        inspect.unwrap(type(optimizer).step)(optimizer)
        torch._foreach_lerp_(average, params, 0.1)


@pytest.mark.family(3)
@pytest.mark.parametrize("where", ["inductor", "eager", "error"])
def test_clip_step_and_average_in_one_graph(where: str) -> None:
    """All of it is update, so nothing leaves it, whatever the fallback."""
    runs = []
    for function in (compiled(clip_step_average, fallback=where), clip_step_average):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(s)) for s in ((4, 3), (5,), ())]
        average = [p.detach().clone() for p in params]
        optimizer = torch.optim.AdamW(params, foreach=True)
        for _ in range(4):
            for p in params:
                p.grad = torch.randn(p.shape)
            function(optimizer, params, average)
        runs.append([*params, *average, *(p.grad for p in params)])
    assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
    assert all(not r.fallback and not r.parts for r in fuseopt.reports())


# ---------------------------------------------------------------- dynamic shapes


def test_a_batch_of_another_size_under_dynamic_shapes() -> None:
    """The model's graph has symbols in its shapes, the update is built once."""
    torch.manual_seed(0)
    models = [Custom(), Custom()]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, foreach=True) for m in models]
    forward = torch.compile(
        models[0], backend=backend, dynamic=True, options={"fallback": "eager"}
    )
    step = torch.compile(optimizers[0].step, backend=backend, dynamic=True)
    built = []
    for batch in (2, 3, 7):
        x = torch.randn(batch, 8)
        for model, call, update in (
            (models[0], forward, step),
            (models[1], models[1], optimizers[1].step),
        ):
            model.zero_grad()
            call(x).square().mean().backward()
            update()
        built.append(session.builder.builds)
        assert_same(models[0], models[1])
    assert built[0] == built[-1]


def test_parameters_of_new_shapes_build_no_kernel() -> None:
    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        m.lerp_(g, 0.1)
        p.mul_(0.99).addcdiv_(m, m.abs() + 1e-3, value=-0.1)

    step = torch.compile(update, backend=backend, dynamic=True)
    counts = []
    for shape in ((3, 4), (5, 6), (1, 7), (8, 2)):
        runs = []
        for function in (step, update):
            torch.manual_seed(0)
            triple = [torch.randn(shape) for _ in range(3)]
            with torch.no_grad():
                function(*triple)
            runs.append(triple)
        assert all(same_bits(a, b) for a, b in zip(*runs, strict=True))
        counts.append(session.builder.builds)
    assert len(set(counts)) == 1
    assert all(r.launches == 1 and not r.fallback for r in fuseopt.reports())


def test_a_mixed_graph_under_dynamic_shapes() -> None:
    """What one part hands to another has a size that changes from call to call."""

    def step(w: Tensor, p: Tensor, x: Tensor) -> Tensor:
        out = (x @ w).tanh()
        with torch.no_grad():
            p.add_(out.detach().sum(0) * 0.5)
        return out

    runs = []
    for function in (
        torch.compile(
            step, backend=backend, dynamic=True, options={"fallback": "inductor"}
        ),
        step,
    ):
        w, p = torch.eye(4, requires_grad=True), torch.zeros(4)
        outs = []
        for batch in (2, 3, 5):
            x = torch.linspace(-1, 1, batch * 4).view(batch, 4)
            outs.append(function(w, p, x))
            outs[-1].sum().backward()
        runs.append([*outs, w.grad, p])
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b)
    for report in fuseopt.reports():  # one for each size that came by
        assert [part.where for part in report.parts] == ["inductor", "fuseopt"]


# ---------------------------------------------------------------- beside it


@pytest.mark.parametrize("name", MIXED)
def test_a_mixed_graph_is_verified_dumped_and_explained(
    name: str, tmp_path: Any
) -> None:
    function, sides = MIXED[name]
    runs(function, fallback="eager", verify=True, dump_dir=str(tmp_path))
    assert (tmp_path / "step0" / "report.txt").exists()
    model = linear()
    model.register_buffer("average", torch.zeros(4, 4))
    report = fuseopt.explain(
        function, model, torch.ones(5, 4), options={"fallback": "eager"}
    )
    assert report.launches == 1
    assert [part.what for part in report.parts] == sides
    assert torch.equal(model.average, torch.zeros(4, 4))


def test_a_part_is_recompiled_with_its_graph() -> None:
    """Another learning rate, another shape: the parts follow, nothing is stale."""

    def step(w: Tensor, p: Tensor, x: Tensor, rate: float) -> Tensor:
        loss = (x @ w).square().sum()
        p.mul_(1 - rate)
        return loss

    pairs = []
    for function in (compiled(step, fallback="eager"), step):
        w, p, losses = torch.eye(3), torch.ones(5), []
        with torch.no_grad():
            for call, rate in enumerate((0.1, 0.2, 0.3, 0.3)):
                losses.append(function(w * call, p, torch.ones(call + 1, 3), rate))
        pairs.append([p, *losses])
    assert all(same_bits(a, b) for a, b in zip(*pairs, strict=True))


def test_tensors_of_the_graph_die_with_their_owner() -> None:
    """The parts hold no parameter: Dynamo drops it when the model goes."""
    import gc
    import weakref

    model = linear()
    model.register_buffer("average", torch.zeros(4, 4))
    step = compiled(forward_and_update, fallback="eager")
    step(model, torch.ones(2, 4))
    seen = weakref.ref(model.average)
    del model
    gc.collect()
    assert seen() is None
