"""`verify` finds what it should: other bits, blind comparisons, steps in eager."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from fuseopt.cli.main import main
from fuseopt.conformance import verify as module
from fuseopt.conformance.compare import nudge, parameters
from fuseopt.conformance.course import EVENTS, LEAST, MISSING, RATES, RESUMED
from fuseopt.conformance.subject import NotRepeatable, Subject
from fuseopt.conformance.verify import Result, verify
from tests import ROOT


def subject(make: Callable[..., Any], **options: Any) -> Subject:
    return Subject("subject", make, options)


def run(make: Callable[..., Any], **options: Any) -> Result:
    return verify(subject(make, **options), LEAST)


class Simple(Optimizer):
    """A step of one line; `change` sees each parameter after it."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, {"lr": 0.1, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])


def test_equal_bits_in_one_launch() -> None:
    found = verify(subject(AdamW, lr=0.01))
    assert (found.outcome, found.launches, found.externs) == ("equal", 1, 0)
    assert (found.done, found.left_out) == (EVENTS, ())
    assert (found.shapes, found.parameters) == ("awkward", 8)
    assert found.control.startswith("parameter 7 moved; parameter 7: 3")
    assert found.differences == found.warnings == ()


@pytest.mark.slow
def test_a_function_with_a_model_of_its_own() -> None:
    def make() -> Optimizer:
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.LayerNorm(4))
        return Adam(model.parameters(), amsgrad=True)

    found = run(make)
    assert (found.outcome, found.launches) == ("equal", 1)
    assert (found.shapes, found.parameters, found.elements) == ("its own", 4, 32)


def test_shapes_that_an_optimizer_takes() -> None:
    class Matrices(Simple):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad * p.grad.mean(dim=1, keepdim=True))

    found = run(Matrices)
    assert (found.outcome, found.shapes) == ("equal", "matrices")
    assert [event for event, _ in found.left_out] == [MISSING]
    assert set(found.done) == {RATES, RESUMED}
    assert "'NoneType'" in found.left_out[0][1]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["parameter", "state", "group"])
def test_an_ulp_that_a_step_adds_is_found(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one tensor of many, or in an option."""

    def wrong(optimizer: Optimizer) -> Any:
        calls = itertools.count()

        def step() -> None:
            optimizer.step()
            if next(calls) != 2:
                return
            p = parameters(optimizer)[1]
            if where == "group":
                optimizer.param_groups[0]["lr"] *= 1 + 2e-16
            else:
                state = optimizer.state[p]["momentum_buffer"]
                nudge(p.detach() if where == "parameter" else state)

        return step

    monkeypatch.setattr(module, "compiled", wrong)
    found = run(SGD, lr=0.1, momentum=0.9)
    assert found.outcome == "differs"
    assert found.reason == "step 3"
    names = {
        "parameter": "parameter 1: 9 elements, 1 ulp at most",
        "state": "momentum_buffer of parameter 1: 9 elements, 1 ulp at most",
        "group": "lr of group 0: ",
    }
    assert len(found.differences) == 1
    assert found.differences[0].startswith(names[where])


@pytest.mark.slow
def test_a_comparison_that_sees_nothing_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "differences", lambda *_: [])
    assert main(["verify", "torch.optim:SGD", "--steps", "6", "--set", "lr=0.1"]) == 1
    text = capsys.readouterr().out
    assert "proves nothing" in text
    assert "did not see a tensor that was moved by an ulp" in " ".join(text.split())


@pytest.mark.slow
def test_a_control_in_another_tensor_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Something differs, but not what was moved."""
    moved: list[Any] = []
    monkeypatch.setattr(
        module, "nudge", lambda t: moved.append(t) or t.new_zeros(()).add_(1)
    )
    found = run(SGD, lr=0.1)
    assert moved
    assert found.outcome == "proves nothing"


def test_where_a_step_computes_parameters_anew_its_state_is_moved() -> None:
    """An ulp in a parameter is gone after the step, which reads the state alone."""

    class Anew(Simple):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if "z" not in state:
                        state["z"] = p.clone()
                    state["z"].sub_(p.grad, alpha=group["lr"])
                    p.copy_(state["z"])

    found = run(Anew)
    assert found.outcome == "equal"
    assert found.control.startswith("z of parameter 7 moved; parameter 7: 3")


def test_a_step_in_eager_is_not_equal() -> None:
    class Told(Simple):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    for x in (p.grad.tolist(),):
                        p.add_(torch.tensor(x), alpha=-group["lr"])

    found = run(Told)
    assert (found.outcome, found.launches) == ("eager", 0)
    assert found.reason
    assert found.warnings


@pytest.mark.filterwarnings("default")
def test_what_torch_keeps_from_dynamo_is_refused() -> None:
    class Apart(Simple):
        step = torch._dynamo.disable(Simple.step)

    found = run(Apart)
    assert found.outcome == "refused"
    assert found.reason


def test_eager_that_differs_from_itself_is_not_run() -> None:
    calls = itertools.count()

    class Unsteady(Simple):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            with torch.no_grad():
                for p in parameters(self):
                    p.add_(float(next(calls)))

    found = run(Unsteady)
    assert found.outcome == "not run"
    assert found.reason.endswith("eager differs from itself")


def test_an_error_of_the_compiled_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(optimizer: Optimizer) -> Any:
        raise_at = itertools.count()

        def step() -> None:
            if next(raise_at) == 1:
                raise ValueError("no such thing\nmore")
            optimizer.step()

        return step

    monkeypatch.setattr(module, "compiled", broken)
    found = run(SGD, lr=0.1)
    assert found.outcome == "raises"
    assert found.reason == "step 2: ValueError: no such thing"


def test_eager_that_raises_is_not_run() -> None:
    class Broken(Simple):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("not today")

    found = run(Broken)
    assert (found.outcome, found.reason) == (
        "not run",
        "eager raises ValueError: not today",
    )


class Asks(Simple):
    """Its step needs a closure."""

    @torch.no_grad()
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
        return loss


@pytest.mark.parametrize(
    ("make", "outcome"), [(Asks, "equal"), (torch.optim.LBFGS, "refused")]
)
def test_a_step_that_needs_a_closure_gets_one(make: Any, outcome: str) -> None:
    found = run(make)
    assert found.outcome == outcome
    assert found.steps == LEAST


def test_without_a_rate_nothing_moves() -> None:
    class Bare(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in parameters(self):
                if p.grad is not None:
                    p.sub_(p.grad)

    found = run(Bare)
    assert found.outcome == "equal"
    assert found.left_out == ((RATES, "its groups have no rate"),)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: 3, "makes no optimizer, but a int"),
        (lambda: Simple([{"params": []}]), "without parameters"),
    ],
)
def test_what_makes_no_optimizer(make: Any, told: str) -> None:
    with pytest.raises(NotRepeatable, match=told):
        run(make)


def test_one_that_is_remade_over_the_same_parameters_is_seen() -> None:
    """Both would step the same tensors, and nothing could ever differ."""
    held = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(NotRepeatable, match="the same parameters"):
        run(lambda: SGD([held], lr=0.1))


def test_one_that_begins_elsewhere_each_time_is_seen() -> None:
    counted = itertools.count()

    with pytest.raises(NotRepeatable, match="different numbers"):
        run(lambda: SGD([torch.nn.Parameter(torch.rand(3) + next(counted))], lr=0.1))


# ---------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["verify", "torch.optim:SGD", "--steps", "6", "--json"]
    more = ["--dtype", "float32", "bfloat16", "--set", "lr=0.1", "momentum=0.9"]
    assert main([*command, *more]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [(x["dtype"], x["outcome"]) for x in found] == [
        ("float32", "equal"),
        ("bfloat16", "equal"),
    ]
    assert all(x["launches"] == 1 and x["control"] for x in found)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere_at_all:make"], "there is no module nowhere_at_all"),
        (["torch.optim:Nothing"], "has no Nothing"),
        (["torch:__version__"], "cannot be made twice"),
        (["torch.optim:SGD", "--dtype", "int8"], "known are float32"),
        (["torch.optim:SGD", "--set", "lr"], "not of the form NAME=VALUE"),
        (["torch:get_num_threads"], "makes no optimizer"),
    ],
)
def test_what_cannot_be_verified(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *arguments]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_module_of_the_working_folder(tmp_path: Path) -> None:
    """As a user calls it: the table, nothing on stderr, and the exit status."""
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def make():\n"
        "    return torch.optim.AdamW(torch.nn.Linear(4, 3).parameters())\n"
    )
    for target in ("mine:make", "mine.py:make"):
        done = subprocess.run(
            [sys.executable, "-m", "fuseopt", "verify", target],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "equal" in done.stdout
        assert "control, by an ulp: parameter 0 moved; parameter 0: 1" in done.stdout
