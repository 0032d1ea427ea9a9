"""Looking inside: explain, reports, dumps, debug levels, the entry point."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.runtime import run_tables
from tests.compiler.test_dump_folders import FILES
from tests.steps import compiled, make, make_params, set_grads


def test_explain_plans_and_changes_nothing() -> None:
    params = make_params([(4, 3), (5,)])
    optimizer = make("AdamW", params)
    before = [p.detach().clone() for p in params]
    report = fuseopt.explain(optimizer.step)
    assert report.launches == 1
    assert report.lanes == 2
    assert report.kernels[0].bytes_per_element == 28
    assert report.kernels[0].target == "cpp"
    assert "struct Table" in report.kernels[0].source
    assert report.externs == []
    assert report.not_fused == []
    assert report.backend_seconds > 0
    assert report.build_seconds < report.backend_seconds
    assert sum(report.seconds.values()) == report.backend_seconds
    assert next(iter(report.seconds)) == "decide"
    assert {"capture", "stages", "fusion", "codegen", "build"} < set(report.seconds)
    assert not optimizer.state
    assert all(p.grad is None for p in params)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert fuseopt.reports() == [], "planning compiles nothing"
    text = str(report)
    assert "1 launch a step" in text
    assert "kernel0" in text
    assert "capture 0." in text


def test_explain_tells_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are of the schedule: nothing is built for them."""
    monkeypatch.setattr(run_tables, "BLOCK", 1)

    def scaled(*params: torch.Tensor) -> None:
        for p in params:
            p.div_(p.norm())

    report = fuseopt.explain(scaled, *map(torch.ones, (40, 50, 60)))
    assert report.blocks == {"kernel0+kernel1": 3}
    assert "3 blocks of lanes" in str(report)


def test_explain_after_steps_keeps_the_state() -> None:
    params = make_params([(4, 3), (5,)])
    optimizer = make("AdamW", params)
    set_grads(params, params, 0)
    optimizer.step()
    saved = [v.clone() for s in optimizer.state.values() for v in s.values()]
    fuseopt.explain(optimizer.step)
    now = [v for s in optimizer.state.values() for v in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(now, saved, strict=True))


def test_explain_a_function() -> None:
    a, b = torch.ones(5), torch.ones(5)

    def update(x: torch.Tensor, y: torch.Tensor) -> None:
        x.mul_(2.0).add_(y)

    report = fuseopt.explain(update, a, b)
    assert report.launches == 1
    assert torch.equal(a, torch.ones(5))


def test_dump_dir_holds_what_a_person_reads(tmp_path: Path) -> None:
    params = make_params([(4, 3), (5,)])
    optimizer = make("AdamW", params)
    step = compiled(optimizer, dump_dir=str(tmp_path / "dump"))
    for seed in range(2):
        set_grads(params, params, seed)
        step()
        optimizer.param_groups[0]["weight_decay"] = 0.0  # another way of the step
    reports = fuseopt.reports()
    assert [r.dump_dir for r in reports] == [
        str(tmp_path / "dump" / f"step{i}") for i in range(2)
    ]
    folder = tmp_path / "dump" / "step0"
    assert {p.name for p in folder.iterdir()} == FILES
    assert (folder / "kernel0.cpp").read_text() == reports[0].kernels[0].source
    assert "once per lane" in (folder / "1_scheduled.txt").read_text()
    assert reports[0].kernels[0].path == str(folder / "kernel0.cpp")


@pytest.mark.parametrize(
    ("level", "names"),
    [
        (1, {"report.txt"}),
        (2, {"report.txt", "not_fused.txt"}),
        (3, {"report.txt", "not_fused.txt", "0_captured.txt", "1_scheduled.txt"}),
    ],
)
def test_debug_levels(
    level: int,
    names: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("FUSEOPT_DEBUG", str(level))
    monkeypatch.chdir(tmp_path)
    params = make_params([(3,)])
    set_grads(params, params, 0)
    compiled(make("SGD", params, lr=0.1))()
    folder = tmp_path / "fuseopt_debug" / "step0"
    assert {p.name for p in folder.iterdir()} == names
    assert "1 launch a step" in capsys.readouterr().err


PROGRAM = """
import torch
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
o = torch.optim.SGD([p], lr=0.5)
torch.compile(o.step, backend="fuseopt")()
assert p.tolist() == [0.5] * 3, p
import sys
assert "fuseopt" in sys.modules
import fuseopt
print(len(fuseopt.reports()))
"""


def test_the_backend_is_found_by_name_without_an_import() -> None:
    """Through the entry point, which needs the package to be installed."""
    from importlib.metadata import entry_points

    if "fuseopt" not in entry_points(group="torch_dynamo_backends").names:
        pytest.fail("fuseopt is not installed: run this with make test")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "1", done.stderr


class InPieces(torch.optim.Optimizer):
    """What comes before the print writes nothing, and the update depends on it."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        total = sum(p.grad.norm() for p in group["params"])
        print("here the graph ends")
        with torch.no_grad():
            for p in group["params"]:
                p.add_(p.grad / total, alpha=-group["lr"])


def test_a_piece_of_a_step_is_explained_as_it_is_compiled() -> None:
    params = make_params([(5,)] * 3)
    set_grads(params, params, 0)
    optimizer = InPieces(params)
    with pytest.warns(RuntimeWarning, match="here the graph ends"):
        explained = fuseopt.explain(optimizer)
    compiled(optimizer)()
    first = fuseopt.reports()[0]
    assert (explained.fallback, explained.launches) == (first.fallback, first.launches)
    assert explained.launches == 1


class Scheduled(torch.optim.SGD):
    """Keeps rates of its own, which torch's copy of an optimizer has not."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rates = [0.1, 0.2]
        self.lock = threading.Lock()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-self.rates[1])


def test_an_optimizer_with_attributes_of_its_own() -> None:
    params = make_params([(3,), (4,)])
    set_grads(params, params, 0)
    optimizer = Scheduled(params)
    report = fuseopt.explain(optimizer)
    assert report.launches == 1
    assert optimizer.rates == [0.1, 0.2]
