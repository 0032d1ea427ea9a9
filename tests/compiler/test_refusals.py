"""Each way to fail: its own class, a message that says what to do, nothing written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fuseopt
from fuseopt import errors
from fuseopt.backend import fuseopt as backend
from fuseopt.compiler.pipeline import target_of
from fuseopt.compiler.session import session
from fuseopt.config import resolve
from fuseopt.ir.graph import Kernel
from fuseopt.runtime.tables.host_numbers import place_of
from fuseopt.scheduler import schedule
from tests.build_graphs import GraphBuilder
from tests.steps import compiled, make, make_params, set_grads


def raised(caught: pytest.ExceptionInfo[BaseException]) -> str:
    return str(caught.value)


def test_fused_inside_another_function_says_what_to_do_instead() -> None:
    """The step itself takes fuseopt's kernel; here Dynamo meets torch's."""
    params = make_params([(3,)])
    set_grads(params, params, 0)
    optimizer = torch.optim.AdamW(params, fused=True)
    before = params[0].detach().clone()

    def train() -> None:
        optimizer.step()

    with pytest.raises(errors.UnsupportedInput, match=r"foreach=True"):
        torch.compile(train, backend=backend)()
    assert torch.equal(params[0], before)
    assert not optimizer.state


def test_steps_that_dynamo_disables() -> None:
    optimizer = torch.optim.LBFGS(make_params([(3,)]))
    with pytest.raises(Exception, match="disabled under Dynamo"):
        torch.compile(optimizer.step, backend=backend)(lambda: torch.tensor(1.0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dumpdir": "x"}, "did you mean 'dump_dir'"),
        ({"target": "metal"}, "expected one of"),
        ({"verify": "yes"}, "expected one of"),
        ({"dump_dir": 3}, "expected a path"),
        ({"batch_bytes": -1}, "expected a number of bytes"),
        ({"batch_bytes": "1e6"}, "expected a number of bytes"),
        ({"batch_bytes": True}, "expected a number of bytes"),
    ],
)
def test_unknown_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        resolve(None, options)
    params = make_params([(3,)])
    set_grads(params, params, 0)
    before = params[0].detach().clone()
    optimizer = make("SGD", params, lr=0.1)
    with pytest.raises(errors.ConfigError, match=words):
        torch.compile(optimizer.step, backend=backend, options=options)
    step = torch.compile(lambda: optimizer.step(), backend=backend, options=options)
    with pytest.raises(Exception, match=words):
        step()
    assert torch.equal(params[0], before)


def test_unknown_mode_and_debug_level() -> None:
    with pytest.raises(errors.ConfigError, match="unknown mode 'fastest'"):
        resolve("fastest")
    with pytest.raises(errors.ConfigError, match="FUSEOPT_DEBUG"):
        resolve(None, None, {"FUSEOPT_DEBUG": "loud"})


def test_sparse_grads() -> None:
    table = torch.nn.Embedding(10, 3, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    before = table.weight.detach().clone()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with pytest.raises(Exception, match=r"gradient of parameter 0 of group 0.*sparse"):
        torch.compile(optimizer.step, backend=backend)()
    assert torch.equal(table.weight, before)


def test_grads_that_become_sparse() -> None:
    params = make_params([(4, 3)])
    set_grads(params, params, 0)
    step = compiled(make("SGD", params, lr=0.1))
    step()
    before = params[0].detach().clone()
    params[0].grad = torch.eye(4, 3).to_sparse()
    with pytest.raises(Exception, match="sparse"):
        step()
    assert torch.equal(params[0], before)


def test_a_closure_runs_and_the_update_is_compiled() -> None:
    params = make_params([(4, 3), (5,)])
    others = make_params([(4, 3), (5,)])
    runs = []
    for own in (params, others):
        optimizer = make("SGD", own, lr=0.1)

        def closure(own: Any = own, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum((p**2).sum() for p in own)
            loss.backward()
            return loss

        step = (
            optimizer.step if own is others else compiled(optimizer, fallback="eager")
        )
        runs.append([float(step(closure).detach()) for _ in range(3)])
    assert runs[0] == runs[1]
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    assert any(r.launches == 1 for r in fuseopt.reports())


class Sorted(torch.optim.Optimizer):
    """An optimizer with an op that no rule covers, between two that are covered."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                ordered = torch.cumsum(p.grad * 2.0, 0)
                p.add_(ordered * 3.0, alpha=-group["lr"])


def test_an_op_without_a_rule_runs_as_it_is_and_is_reported() -> None:
    runs = []
    for compile_it in (True, False):
        params = make_params([(7,), (4, 3)])
        set_grads(params, params, 5)
        optimizer = Sorted(params)
        step = compiled(optimizer) if compile_it else optimizer.step
        for _ in range(3):
            step()
        runs.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    (report,) = fuseopt.reports()
    assert [name for name, _ in report.externs] == ["aten.cumsum.default"] * 2
    assert report.launches == 2
    assert {r.code for r in report.not_fused} == {"extern"}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    session.reset()


def test_no_compiler_warns_once_and_runs_in_eager(no_compiler: None) -> None:
    params, others = make_params([(3,)]), make_params([(3,)])
    set_grads(params, others, 0)
    step = compiled(make("SGD", params, lr=0.1))
    with pytest.warns(RuntimeWarning, match="no C.. compiler was found. Install one"):
        step()
    make("SGD", others, lr=0.1).step()
    assert torch.equal(params[0], others[0])
    (report,) = fuseopt.reports()
    assert "It runs in eager" in report.fallback
    torch._dynamo.reset()


def test_fallback_error_refuses_a_forward() -> None:
    model = torch.nn.Linear(3, 4)
    step = torch.compile(model, backend=backend, options={"fallback": "error"})
    with pytest.raises(Exception, match="no optimizer step"):
        step(torch.ones(2, 3))


@pytest.mark.parametrize("where", ["inductor", "eager"])
def test_a_forward_goes_elsewhere_and_is_reported(where: str) -> None:
    model = torch.nn.Linear(3, 4)
    step = torch.compile(model, backend=backend, options={"fallback": where})
    x = torch.ones(2, 3)
    torch.testing.assert_close(step(x), model(x))
    step(x).sum().backward()
    assert model.weight.grad is not None
    (report,) = fuseopt.reports()
    assert f"It runs in {where}" in report.fallback


def test_tensors_that_overlap_run_in_eagers_order() -> None:
    flat = torch.linspace(0, 1, 12)
    twin = flat.clone()
    runs = []
    for memory in (flat, twin):
        params = [torch.nn.Parameter(memory[:8]), torch.nn.Parameter(memory[4:])]
        for p in params:
            p.grad = torch.linspace(1, 2, 8)
        runs.append(params)
    step = compiled(make("SGD", runs[0], lr=0.1, momentum=0.9))
    reference = make("SGD", runs[1], lr=0.1, momentum=0.9)
    for _ in range(3):
        step()
        reference.step()
        assert torch.equal(flat, twin)


def test_tensors_of_several_devices_are_named() -> None:
    """A lane whose tensors lie apart cannot be one kernel; it is left to eager."""
    g = GraphBuilder()
    p = g.tensor("weight", (4,), device="cuda:0")
    other = g.tensor("other", (4,), device="cuda:0")
    g.op("mul", p, other, out=p)
    graph = g.graph()
    (kernel,) = schedule(graph).steps
    assert isinstance(kernel, Kernel)
    assert place_of(graph.buffers, kernel) == "cuda:0"
    apart = [
        b._replace(device="cpu") if b.name == "other" else b for b in graph.buffers
    ]
    with pytest.raises(errors.CaptureError, match=r"weight on cuda:0.*other on cpu"):
        place_of(apart, kernel)


def test_each_device_has_a_kernel_of_its_own() -> None:
    g = GraphBuilder()
    for device in ("cuda:0", "cuda:1", "cpu"):
        p = g.tensor(f"p@{device}", (4,), device=device)
        g.op("mul", p, 0.5, out=p)
    graph = g.graph()
    kernels = [k for k in schedule(graph).steps if isinstance(k, Kernel)]
    devices = [place_of(graph.buffers, k) for k in kernels]
    # the CPU's first: kernels of devices may read its numbers
    assert devices == ["cpu", "cuda:0", "cuda:1"]
    targets = [target_of(resolve(), d).name for d in devices]
    assert targets == ["cpp", "triton", "triton"]
    with pytest.raises(errors.ConfigError, match="cannot run on cuda:0"):
        target_of(resolve(None, {"target": "cpp"}), "cuda:0")


class Counter:
    """Python state that Dynamo cannot see: it does not look into `count`."""

    def __init__(self) -> None:
        self.calls = 0

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
@pytest.mark.filterwarnings("ignore:fuseopt. a step runs in eager")
@pytest.mark.parametrize("how", ["allow_in_graph", "disable"])
def test_python_state_that_dynamo_cannot_see(how: str) -> None:
    """A function that Dynamo leaves whole runs at each call, as in eager.

    In the graph (allow_in_graph) it would run once, at capture, on tensors without
    memory: that graph is refused before anything is written. Outside (disable) the
    updates around it are compiled.
    """
    counters = Counter(), Counter()
    opaque = [getattr(torch._dynamo, how)(lambda x, c=c: c.scale(x)) for c in counters]

    def step(p: torch.Tensor, g: torch.Tensor, scale: Any) -> None:
        p.mul_(0.5)
        p.sub_(scale(g) * 0.1)

    # Dynamo itself runs such a function once while it traces: that is eager's too
    compiled = torch.compile(step, backend=backend, options={"fallback": "eager"})
    reference = torch.compile(step, backend="eager")
    p, q = torch.ones(4), torch.ones(4)
    with torch.no_grad():
        for call in range(4):
            g = torch.full((4,), float(call + 1))
            compiled(p, g, opaque[0])
            reference(q, g, opaque[1])
            assert torch.equal(p, q), call
    assert counters[0].calls == counters[1].calls
    assert counters[0].calls == 4 + (how == "allow_in_graph")
    told = [r.fallback for r in fuseopt.reports()]
    if how == "allow_in_graph":
        assert "which Dynamo does not trace" in told[0]
    else:
        assert "" in told


def test_python_state_that_dynamo_sees_is_kept() -> None:
    """Attributes, lists and dicts that a step changes are changed at each call."""
    log: list[int] = []
    state = {"step": 0, "seen": 0.0}

    def step(p: torch.Tensor, g: torch.Tensor) -> None:
        state["step"] += 1
        state["seen"] = state["seen"] + 0.5
        log.append(state["step"])
        p.sub_(g * (1 / state["step"]))

    compiled = torch.compile(step, backend=backend)
    p, g, want = torch.ones(4), torch.ones(4), torch.ones(4)
    with torch.no_grad():
        for call in range(1, 6):
            compiled(p, g)
            want.sub_(g * (1 / call))
            assert torch.equal(p, want), call
    assert log == [1, 2, 3, 4, 5]
    assert state == {"step": 5, "seen": 2.5}


def test_nothing_is_written_when_capture_fails() -> None:
    """A graph refused at its last call runs in eager once, not one and a half times."""

    def step(p: torch.Tensor, g: torch.Tensor) -> None:
        p.mul_(2.0).add_(g)
        p.sub_(torch.cond(p.sum() > 0, torch.sin, torch.cos, (g,)))

    for fallback in ("eager", "error"):
        p, q, g = torch.ones(4), torch.ones(4), torch.ones(4)
        torch._dynamo.reset()
        options = {"fallback": fallback}
        compiled = torch.compile(step, backend=backend, options=options)
        with torch.no_grad():
            if fallback == "error":
                with pytest.raises(errors.CaptureError, match="higher-order op"):
                    compiled(p, g)
                assert torch.equal(p, torch.ones(4))
            else:
                with pytest.warns(RuntimeWarning, match="a step runs in eager"):
                    compiled(p, g)
                step(q, g)
                assert torch.equal(p, q)


@pytest.mark.parametrize("fallback", ["inductor", "error"])
def test_capture_that_fails_at_a_later_call(
    fallback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other tensors than the step was compiled for, which it cannot be: eager."""
    from fuseopt.compiler import pipeline

    params, others = make_params([(4,)]), make_params([(4,)])
    set_grads(params, others, 0)
    step = compiled(make("SGD", params, lr=0.1), fallback=fallback)
    reference = make("SGD", others, lr=0.1)
    step()
    reference.step()

    def refused(*_: Any, **__: Any) -> Any:
        raise errors.CaptureError("no plan for these")

    monkeypatch.setattr(pipeline, "plan_graph", refused)
    for p in (*params, *others):
        p.data, p.grad = torch.ones(3, 2), torch.full((3, 2), 0.5)
    if fallback == "error":
        with pytest.raises(errors.CaptureError, match="no plan for these"):
            step()
        assert torch.equal(params[0], torch.ones(3, 2))
        return
    with pytest.warns(RuntimeWarning, match="a step runs in eager"):
        step()
    reference.step()
    assert torch.equal(params[0], others[0])
    assert "A call runs in eager: no plan" in fuseopt.reports()[-1].fallback
