"""The replay tool: a recording of the same code is the same, another one is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools import replay

STEP = """
import torch

def step(p, m, g):
    m.mul_(0.9).add_(g)
    p.sub_(m, alpha=RATE)

def test_step():
    tensors = [torch.ones(3) for _ in range(3)]
    torch.compile(step, backend="fuseopt")(*tensors)
"""


def record(folder: Path, kept: Path, rate: str) -> list[dict[str, object]]:
    folder.mkdir(exist_ok=True)
    (folder / "test_step.py").write_text(STEP.replace("RATE", rate))
    flags = [
        "-p",
        "tests.tools.replay",
        "--replay",
        str(kept),
        "-p",
        "no:cacheprovider",
    ]
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *flags, str(folder / "test_step.py")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    (own,) = kept.glob("*.jsonl")  # named by the worker, if this test runs in one
    return [json.loads(line) for line in own.read_text().splitlines()]


@pytest.mark.slow
def test_a_recording_holds_all_that_a_test_compiles(tmp_path: Path) -> None:
    (line,) = record(tmp_path / "tests", tmp_path / "one", "0.5")
    kinds = [kind for kind, _ in line["entries"]]  # type: ignore[attr-defined]
    assert sorted(kinds) == [
        "graph",
        "layout of cpp",
        "schedule",
        "source of cpp",
        "table",
    ]
    again = record(tmp_path / "tests", tmp_path / "two", "0.5")
    assert again == [line]
    assert replay.compare(tmp_path / "one", tmp_path / "two") == 0


@pytest.mark.slow
def test_another_number_is_another_table_and_the_same_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "tests", tmp_path / "one", "0.5")
    record(tmp_path / "tests", tmp_path / "two", "0.25")
    assert replay.compare(tmp_path / "one", tmp_path / "two") == 1
    told = capsys.readouterr().out
    assert "table of " in told
    assert "source of" not in told
    assert "-rows: " in told
    assert "+rows: " in told


def test_tests_that_came_or_went_are_counted_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, tests in ("old", "ab"), ("new", "bc"):
        recorder = replay.Recorder(tmp_path / name)
        for test in tests:
            recorder.begin(test)
            recorder.note("graph", "one node")
            recorder.end()
    assert replay.compare(tmp_path / "old", tmp_path / "new") == 0
    assert "1 texts of 1 tests compared: 0 tests differ" in capsys.readouterr().out
