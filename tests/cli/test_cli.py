"""The command line: its output, its exit status, what it does to a cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuseopt.cli import checks
from fuseopt.cli.main import main
from tests import ROOT

OPTIMIZER = """
import torch
from beside import SHAPE

params = [torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(5)]
opt = torch.optim.SGD(params, lr=0.1)
text = "no optimizer"


class Held:
    made = opt


def build():
    return torch.optim.AdamW(params)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the cache, in which nothing was built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("FUSEOPT_CACHE_DIR", raising=False)
    return tmp_path


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_doctor_finds_that_all_is_well(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, told = answer(capsys, "doctor")
    states = {x["name"]: x["state"] for x in told["findings"]}
    assert (status, states["C++ compiler"], states["torch"]) == (0, "ok", "ok")
    (step,) = [x for x in told["findings"] if x["name"] == "a step on cpu"]
    assert step["text"] == "1 launch, the bits of eager"


def test_doctor_names_the_command_that_mends(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    status = main(["doctor"])
    text = capsys.readouterr().out
    assert status == 1
    assert "no-such-compiler" in text
    assert "-> apt install g++" in text


@pytest.mark.parametrize(
    ("version", "state"),
    [("2.13.0+cpu", "ok"), ("2.10.1", "fail"), ("2.16.0.dev20270101", "warn")],
)
def test_versions_of_torch(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", version)
    found = checks.torch_version()
    assert found.state == state
    assert bool(found.remedy) == (state != "ok")


def test_a_cache_that_others_may_write_is_told(home: Path) -> None:
    folder = home / "fuseopt"
    folder.mkdir()
    folder.chmod(0o777)
    found = checks.cache()
    assert found.state == "warn"
    assert "chmod" in found.remedy


@pytest.mark.slow
def test_a_cache_is_listed_and_cleared(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(capsys, "cache", "ls")[1]["kernels"] == []
    code = "from fuseopt.cli.checks import step_on; assert step_on('cpu').state == 'ok'"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    status, told = answer(capsys, "cache", "ls")
    assert (status, told["path"]) == (0, str(home / "fuseopt"))
    kernels = told["kernels"]
    assert kernels
    assert all(x["bytes"] > 1000 for x in kernels)
    assert main(["cache", "ls"]) == 0
    assert kernels[0]["key"] in capsys.readouterr().out
    status, told = answer(capsys, "cache", "clear")
    assert (status, told["removed"]) == (0, len(kernels))
    assert answer(capsys, "cache", "ls")[1]["kernels"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("file with a ümlaut.py", "opt"),
        ("file with a ümlaut.py", "build"),
        ("file with a ümlaut.py", "Held.made"),
        # no shell and no import reads the name
        ("a b;touch made.py", "opt"),
        ("$(touch made).py", "opt"),
        ("folder.with.dots.v1.py", "opt"),
    ],
)
def test_an_optimizer_of_a_file_is_explained(
    file: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / file).write_text(OPTIMIZER, encoding="utf-8")
    (tmp_path / "beside.py").write_text("SHAPE = (3,)", encoding="utf-8")
    target = f"{tmp_path}/{file}:{name}"
    done = subprocess.run(
        [sys.executable, "-m", "fuseopt", "explain", target],
        capture_output=True,
        encoding="utf-8",
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONIOENCODING": "utf-8",
            # what torch says of an early Python
            "PYTHONWARNINGS": "ignore:Guards may run slower",
        },
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 launch a step, 5 lanes" in done.stdout
    assert {x.name for x in tmp_path.glob("*.*")} == {file, "beside.py"}


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("file.py:nothing", "has no nothing"),
        ("file.py:text", "is no optimizer, but a str"),
        ("file.py:__import__('os').system('exit')", "has no __import__"),
        ("file.py:text.__class__", "is no optimizer"),
        ("file.py:", ""),
        ("nowhere.py:opt", "there is no file"),
        ("file.py", "neither FILE.py"),
    ],
)
def test_what_is_no_optimizer_is_named(
    target: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.py").write_text("text = 'x'", encoding="utf-8")
    assert main(["explain", f"{tmp_path}/{target}"]) == 1
    assert told in capsys.readouterr().err


def test_a_wrong_command_line_has_a_status_of_its_own() -> None:
    with pytest.raises(SystemExit) as left:
        main(["no-such-command"])
    assert left.value.code == 2


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m fuseopt cache ls | head -c 1"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stderr == ""
