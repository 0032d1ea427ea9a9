"""What compiling costs, in counts: it follows distinct bodies, not lanes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.capture import Captured, capture
from fuseopt.capture.aten.recorder import Recorder
from fuseopt.compiler import pipeline
from fuseopt.compiler.pipeline import Schedule
from fuseopt.errors import BuildError
from fuseopt.ir.verifier import check_graph, check_schedule
from fuseopt.replicate import rehearsal
from fuseopt.runtime.executor import Program
from fuseopt.scheduler import schedule, stages
from tests import ROOT
from tests.frames import entered
from tests.steps import make_params

FEW, MANY = 4, 12
WAYS = ("torch.compile", "fuseopt.compile")
#: Two shapes with dimensions, and every fourth lane is one number.
SHAPES = ((6, 5), (7,), (3, 4), ())


class OwnLoop(torch.optim.Optimizer):
    """A for-loop as papers write it, with a norm of each parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                m = state["m"]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                trust = p.norm() / (m.norm() + 1e-6)
                p.add_(m * trust, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "for-loop": lambda params: torch.optim.AdamW(params, foreach=False),
    "foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "own": OwnLoop,
}


def planned(
    make: Callable[[Any], torch.optim.Optimizer], shapes: Sequence[tuple[int, ...]]
) -> tuple[Captured, Schedule]:
    """Capture and schedule a first step; nothing runs."""
    params = make_params(shapes)
    optimizer = make(params)
    for p in params:
        p.grad = torch.ones_like(p)
    found: list[tuple[Captured, Schedule]] = []

    class Planned(Exception):
        """Leaves the step before anything of it runs."""

    def backend(gm: torch.fx.GraphModule, args: Any) -> Any:
        captured = capture(gm, args)
        plan = schedule(captured.graph)
        check_graph(captured.graph)
        check_schedule(captured.graph, plan)
        found.append((captured, plan))

        def leave(*_: Any) -> Any:
            raise Planned

        return leave

    with pytest.raises(Planned):
        torch.compile(optimizer.step, backend=backend)()
    return found[0]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often a call reached the recorder, and a pair of nodes was judged."""
    found = {"calls": 0, "proofs": 0}
    dispatch, judge = Recorder.__torch_dispatch__, stages.why_not

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        found["calls"] += 1
        return dispatch(self, *args, **kwargs)

    def judged(*args: Any) -> Any:
        found["proofs"] += 1
        return judge(*args)

    monkeypatch.setattr(Recorder, "__torch_dispatch__", counted)
    monkeypatch.setattr(stages, "why_not", judged)
    return found


@pytest.mark.family(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_more_lanes_need_no_more_calls_or_proofs(
    kind: str, counts: dict[str, int]
) -> None:
    seen = []
    for lanes in (FEW, MANY):
        counts.update(calls=0, proofs=0)
        _, plan = planned(OPTIMIZERS[kind], SHAPES * (lanes // len(SHAPES)))
        assert plan.steps
        seen.append(dict(counts))
        torch._dynamo.reset()
    assert seen[0]["calls"] > 0 < seen[0]["proofs"]
    # a loop is seen to be one when it comes round the third time
    assert seen[1]["proofs"] == seen[0]["proofs"]
    assert seen[1]["calls"] <= seen[0]["calls"]


def test_pointwise_lanes_are_recorded_once_for_all_shapes(
    counts: dict[str, int],
) -> None:
    seen = []
    for shapes in (((3, 4),) * 3, ((3, 4), (5, 6), (7, 8), (9, 2))):
        counts.update(calls=0)
        planned(OPTIMIZERS["for-loop"], shapes)
        seen.append(counts["calls"])
        torch._dynamo.reset()
    assert seen[0] == seen[1]


def test_lanes_that_differ_are_recorded_each() -> None:
    """One element, none, a transposed one: what recording asks of them differs."""

    def make(params: Any) -> torch.optim.Optimizer:
        with torch.no_grad():
            params[1].set_(params[1].t().contiguous().t())
        return torch.optim.AdamW(params, foreach=False)

    shapes = [(4, 3), (4, 3), (1,), (0,), (4, 3), (1, 1), (1, 5), (5,)]
    captured, plan = planned(make, shapes)
    (kernel,) = (s for s in plan.steps if hasattr(s, "variants"))
    found = {shape for v in kernel.variants for shape in v.shapes}
    assert found >= {(4, 3), (1, 5), (5,), (0,)}
    strides = {b.stride for b in captured.graph.buffers if b.shape == (4, 3)}
    assert strides == {(3, 1), (1, 4)}


def adamw(lanes: int = 16) -> torch.optim.Optimizer:
    params = make_params([(3,)] * lanes)
    for p in params:
        p.grad = torch.ones_like(p)
    return torch.optim.AdamW(params)


def compiled(way: str, optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    if way == "fuseopt.compile":
        return fuseopt.compile(optimizer).step
    return torch.compile(optimizer.step, backend="fuseopt")


@pytest.mark.parametrize("way", WAYS)
def test_no_garbage_is_collected_while_a_step_is_compiled(
    way: str, request: pytest.FixtureRequest
) -> None:
    """What is made then stays: a collection would go over all of it for naught."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    optimizer = adamw()
    step = compiled(way, optimizer)
    known = gc.get_threshold()
    request.addfinalizer(lambda: gc.set_threshold(*known))
    collected: list[str] = []

    def note(phase: str, _: Any) -> None:
        frame: Any = sys._getframe(1)
        while phase == "start" and frame is not None:
            if frame.f_code.co_name in (
                "trace_frame",
                "rehearse_all",
                "plan_graph",
                "_table",
            ):
                collected.append(frame.f_code.co_name)
            frame = frame.f_back

    gc.callbacks.append(note)
    request.addfinalizer(lambda: gc.callbacks.remove(note))
    gc.set_threshold(100, 10, 10)
    step()
    assert gc.isenabled()
    assert collected == []


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each rehearsal, the functions that it enters and the calls that it records."""
    rehearse = rehearsal.rehearse
    seen: list[tuple[int, int]] = []

    def counted(*args: Any) -> Any:
        records: list[Any] = []
        codes = entered(lambda: records.append(rehearse(*args)))
        (found,) = records
        seen.append((len(codes), sum(map(len, found.lanes.values()))))
        return found

    monkeypatch.setattr(rehearsal, "rehearse", counted)
    return seen


def test_a_call_of_a_rehearsal_is_a_few_functions(
    rehearsed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 16 lanes take more than the models, by call that is recorded."""
    monkeypatch.setattr(rehearsal, "SAMPLE", 16)
    compiled("fuseopt.compile", adamw())()
    # the models, the lanes; with other numbers the same again
    (of_models, known), (of_lanes, recorded), *again = rehearsed
    assert len(again) == 2
    # the double of each lane's tensors is among them
    assert (of_lanes - of_models) / (recorded - known) < 42


def test_a_rehearsal_of_many_lanes_is_that_of_few(
    rehearsed: list[tuple[int, int]],
) -> None:
    """1,000 lanes would make 20,000 calls; of them three of each kind are run."""
    compiled("fuseopt.compile", adamw(16))()
    few = rehearsed.copy()
    rehearsed.clear()
    torch._dynamo.reset()
    compiled("fuseopt.compile", adamw(160))()
    assert [calls for _, calls in rehearsed] == [calls for _, calls in few]
    # the groups and the optimizer's own containers are copied whole
    assert [functions for functions, _ in rehearsed] == [n for n, _ in few]


@pytest.mark.parametrize("way", WAYS)
def test_compilers_run_beside_what_dynamo_and_the_rehearsal_do(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may be ready only after the backend has given the step to Dynamo, and
    after the step was rehearsed.
    """
    other_work = threading.Event()
    waited: list[bool] = []
    load, bind, rehearse = pipeline._load, Program.bind, rehearsal.rehearse

    def slow(*args: Any) -> Any:
        waited.append(other_work.wait(60))
        return load(*args)

    def binding(*args: Any) -> Any:
        if way == "torch.compile":
            other_work.set()
        return bind(*args)

    def rehearsed(*args: Any) -> Any:
        found = rehearse(*args)
        other_work.set()
        return found

    monkeypatch.setattr(pipeline, "_load", slow)
    monkeypatch.setattr(Program, "bind", binding)
    monkeypatch.setattr(rehearsal, "rehearse", rehearsed)
    optimizer = adamw()
    compiled(way, optimizer)()
    assert waited == [True]
    report = fuseopt.reports()[-1]
    assert sum(report.seconds.values()) == report.backend_seconds
    assert {"build", "bind"} < set(report.seconds)


@pytest.mark.mishaps
@pytest.mark.parametrize("way", WAYS)
def test_a_build_that_fails_is_told_once(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails beside other work, so that the call says it; eager does the step."""

    def refused(*_: Any) -> Any:
        raise BuildError("the compiler says no")

    monkeypatch.setattr(pipeline, "_load", refused)
    optimizer = adamw()
    params = optimizer.param_groups[0]["params"]
    step = compiled(way, optimizer)
    before = [p.detach().clone() for p in params]
    with pytest.warns(RuntimeWarning, match="the compiler says no"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
    assert not any(torch.equal(p, b) for p, b in zip(params, before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_first_step_does_not_import_inductor(way: str) -> None:
    """Dynamo would, to ask which gradients Inductor captured in a graph."""
    compiled = {
        "torch.compile": "torch.compile(optimizer.step, backend='fuseopt')",
        "fuseopt.compile": "fuseopt.compile(optimizer).step",
    }[way]
    code = (
        "import sys, torch, fuseopt\n"
        "params = [torch.ones(3, requires_grad=True) for _ in range(16)]\n"
        "for p in params: p.grad = torch.ones(3)\n"
        "optimizer = torch.optim.AdamW(params)\n"
        f"step = {compiled}\n"
        "step()\n"
        "print(*(r.launches for r in fuseopt.reports()))\n"
        "large = ('compile_fx', 'cudagraph_trees', 'lowering')\n"
        "print(*(m for m in large if f'torch._inductor.{m}' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    launches, imported = done.stdout.split("\n")[:2]
    assert (launches, imported) == ("1", "")
