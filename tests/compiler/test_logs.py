"""TORCH_LOGS shows what fuseopt does, as it does for torch's compilers."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler import logs
from fuseopt.config import resolve
from tests import ROOT
from tests.steps import make_params, set_grads

PROGRAM = """
import torch
params = [torch.nn.Parameter(torch.ones(3, 4)) for _ in range(18)]
step = torch.compile(torch.optim.SGD(params, lr=0.1).step, backend="fuseopt")
for _ in range(2):
    for p in params:
        p.grad = torch.ones_like(p)
    step()
"""
#: What is told of a step; by the name that asks for it.
TOLD = {
    "fuseopt": "1 launch a step, 18 lanes",
    "+fuseopt.capture": "captured:",
    "+fuseopt.scheduler": "kernel0: 18 lanes, 1 variants",
    "+fuseopt.codegen": "kernel0, cpp:",
}


def said(folder: Path, **variables: str) -> str:
    """What a program of the user's prints, which loads fuseopt by its entry point."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    for name in ("FUSEOPT_CHECK", "FUSEOPT_DEBUG", "FUSEOPT_DUMP_DIR"):
        env.pop(name, None)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    "asked", [pytest.param("+fuseopt.codegen", marks=pytest.mark.slow), "+fuseopt"]
)
def test_the_variable(asked: str, tmp_path: Path) -> None:
    """Torch parses it before fuseopt is loaded."""
    printed = said(tmp_path, TORCH_LOGS=asked)
    for name, text in TOLD.items():
        assert (text in printed) == (asked in ("+fuseopt", name)), name


@pytest.mark.slow
def test_an_unknown_name_is_said_at_once(tmp_path: Path) -> None:
    """By torch, when it is imported: it is not taken for a log that stays empty."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_LOGS": "+fuseopt.nothing"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "Invalid log settings: +fuseopt.nothing" in done.stderr


def step(**options: Any) -> None:
    params = make_params([(3, 4)] * 18)
    opt = fuseopt.compile(torch.optim.SGD(params, lr=0.1), **options)
    for seed in range(2):
        set_grads(params, params, seed)
        opt.step()


@pytest.mark.parametrize("name", TOLD)
def test_a_logger(name: str, caplog: pytest.LogCaptureFixture) -> None:
    level = logging.DEBUG if name.startswith("+") else logging.INFO
    with caplog.at_level(level, name.removeprefix("+")):
        step()
    assert TOLD[name] in caplog.text


def test_nothing_is_logged_unasked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    step()
    assert [r for r in caplog.records if r.name.startswith("fuseopt")] == []


@pytest.mark.slow
def test_torchs_own_debugging_writes_a_dump(tmp_path: Path) -> None:
    said(tmp_path, TORCH_COMPILE_DEBUG="1")
    (kernel,) = tmp_path.glob("torch_compile_debug/*/fuseopt/step0/kernel0.cpp")
    assert "fuseopt" in kernel.read_text()


@pytest.mark.parametrize("said", ["0", "2", "yes", ""])
def test_the_variable_is_torchs(said: str) -> None:
    """What torch does not take for a yes is none here, and no error."""
    assert not resolve(None, None, {"TORCH_COMPILE_DEBUG": said}).compile_debug


@pytest.mark.slow
def test_the_trace_of_torch_has_what_was_compiled(tmp_path: Path) -> None:
    """As tlparse reads it: a line of JSON with the name, then the text, indented."""
    said(tmp_path, TORCH_TRACE=str(tmp_path / "trace"))
    (log,) = (tmp_path / "trace").glob("*.log")
    names: dict[str, str] = {}
    current = ""
    for line in log.read_text(encoding="utf-8").splitlines():
        if line.startswith("V"):
            found = re.search(r'"artifact": {"name": "(fuseopt_\w+)"', line)
            current = found[1] if found else ""
        elif current:
            names[current] = names.get(current, "") + line + "\n"
    assert sorted(names) == [
        "fuseopt_code",
        "fuseopt_fusion",
        "fuseopt_graph",
        "fuseopt_report",
    ]
    assert TOLD["fuseopt"] in names["fuseopt_report"]
    assert TOLD["+fuseopt.scheduler"] in names["fuseopt_fusion"]
    assert "fuseopt_step(" in names["fuseopt_code"]


def test_texts_for_a_trace_are_made_for_who_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No handler of torch's trace is there, so that no text is made."""
    made: list[str] = []
    monkeypatch.setattr(logs, "show_graph", lambda graph: made.append("graph"))
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "handlers", [])
    step()
    assert made == []
