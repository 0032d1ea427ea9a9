"""Where output goes: narrow terminals, pipes, and such as have few letters."""

from __future__ import annotations

import fcntl
import functools
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest

from fuseopt.cli import checks
from fuseopt.cli.checks import Finding
from fuseopt.cli.main import main
from tests import ROOT

OPTIMIZER = """
import torch

opt = torch.optim.Adafactor([torch.nn.Parameter(torch.ones(5, 4))])
"""
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COMMANDS = [["doctor"], ["explain", "file.py:opt"]]
FINDINGS = (
    Finding("torch", "ok", "2.13.0"),
    Finding("kernel cache", "warn", "/home/" + 60 * "x", "chmod -R go-w " + 60 * "y"),
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an optimizer's file, where a doctor finds what is long to tell."""
    (tmp_path / "file.py").write_text(OPTIMIZER, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    found = [functools.partial(lambda x: x, x) for x in FINDINGS]
    monkeypatch.setattr(checks, "all_checks", lambda: found)
    return tmp_path


def letters(text: str) -> Counter[str]:
    """What a text says, however its cells and lines are broken; times may differ."""
    return Counter(x for x in ESCAPES.sub("", text) if x.isalpha())


@pytest.mark.parametrize("command", COMMANDS, ids=lambda x: x[0])
def test_a_terminal_of_40_columns(
    command: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No line is wider, and what is folded is all there: a report's table of kernels
    had squeezed its words into columns of three letters.
    """
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    told = {}
    for columns in (40, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(command) == 0
        colourful = capsys.readouterr().out
        assert "\x1b[" in colourful
        told[columns] = ESCAPES.sub("", colourful).splitlines()
        assert max(map(len, told[columns])) <= columns
    assert len(told[40]) > len(told[400])
    if command[0] == "doctor":
        assert letters("".join(told[40])) == letters("".join(told[400]))
        return
    all_of_it = " ".join(x.strip() for x in told[40])
    assert "kernel0: target cpp, lanes " in all_of_it
    sentences = [x.strip() for x in told[400] if x.startswith(("not fused", "1 block"))]
    assert len(sentences) >= 3
    for sentence in sentences:
        assert sentence in all_of_it


@pytest.mark.parametrize("command", COMMANDS, ids=lambda x: x[0])
def test_what_is_piped_is_plain(
    command: list[str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No colours, and the same lines wherever it was called."""
    told = []
    for columns in ("40", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main(command) == 0
        told.append(capsys.readouterr().out)
    assert "\x1b" not in told[0]
    assert len(told[0].splitlines()) == len(told[1].splitlines()) > 0
    assert letters(told[0]) == letters(told[1])


@pytest.mark.slow
def test_a_real_terminal(folder: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
    own = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    with subprocess.Popen(
        [sys.executable, "-m", "fuseopt", "explain", "file.py:opt"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**own, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        text = b""
        try:
            while piece := os.read(ours, 4096):
                text += piece
        except OSError:
            pass  # nobody writes to it any more
    os.close(ours)
    assert process.returncode == 0, text
    lines = ESCAPES.sub("", text.decode()).splitlines()
    assert max(map(len, lines)) <= 40
    assert "launches a step" in " ".join(x.strip() for x in lines)


@pytest.mark.slow
def test_a_pipe_without_the_letters(folder: Path) -> None:
    """Of a locale that has ASCII alone, where a name has more."""
    named = folder / "größe.py"
    named.write_text(OPTIMIZER, encoding="utf-8")
    own = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "fuseopt", "explain", f"{named}:nothing"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **own},
        capture_output=True,
    )
    assert done.returncode == 1
    assert b"has no nothing" in done.stderr
    assert b"Traceback" not in done.stderr
