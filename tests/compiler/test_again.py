"""`repro.py` of a dump: the same text in a process that has no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler import again
from tests import ROOT
from tests.papers import ELEMENTWISE, REDUCING

OF_TORCH = ["AdamW", "NAdam", "Adafactor", "Rprop"]
PAPERS = {kind.__name__: (kind, given) for kind, given in [*ELEMENTWISE, *REDUCING]}


def params() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(s)) for s in [(8, 4), (8,), (4, 4)]]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def dumped(folder: Path, optimizer: Any, **options: Any) -> Path:
    given = {"dump_dir": str(folder), **options}
    report = fuseopt.explain(optimizer, options=given)
    assert not report.fallback
    assert report.dump_dir is not None
    return Path(report.dump_dir)


def repro(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it elsewhere, with Python's own hashing, so that no order comes by chance."""
    return subprocess.run(
        [sys.executable, str(folder / again.SCRIPT)],
        env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": str(folder)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("target", ["cpp", "triton"])
def test_the_same_text_in_a_fresh_process(target: str, tmp_path: Path) -> None:
    folder = dumped(
        tmp_path / "ordner_ä", torch.optim.Adafactor(params()), target=target
    )
    done = repro(folder)
    assert done.returncode == 0, done.stderr
    kernels = sorted(p.name for p in folder.glob("kernel?.*") if "layout" not in p.name)
    assert len(kernels) == 4
    assert done.stdout.splitlines() == [f"{name}: the same text" for name in kernels]


@pytest.mark.parametrize("name", [*OF_TORCH, *PAPERS])
def test_every_kind_of_graph(name: str, tmp_path: Path, capsys: Any) -> None:
    if name in OF_TORCH:
        made = getattr(torch.optim, name)(params())
    else:
        kind, given = PAPERS[name]
        made = kind(params(), **given)
    folder = dumped(tmp_path, made)
    assert again.main(folder) == 0
    assert "the same text" in capsys.readouterr().out


def test_where_it_differs(tmp_path: Path) -> None:
    folder = dumped(tmp_path, torch.optim.AdamW(params()))
    kernel = folder / "kernel0.cpp"
    lines = kernel.read_text().splitlines(keepends=True)
    lines[3] = "#include <wrong.h>\n"
    kernel.write_text("".join(lines))
    done = repro(folder)
    assert done.returncode == 1
    assert "kernel0.cpp: line 4 was '#include <wrong.h>', and is '#incl" in done.stdout
    assert f"captured by fuseopt {fuseopt.__version__}" in done.stdout
    kernel.unlink()
    assert "line 1 was None" in repro(folder).stdout


def test_low_levels_have_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEOPT_DEBUG", "3")
    monkeypatch.chdir(tmp_path)
    fuseopt.explain(torch.optim.AdamW(params()))
    names = [p.name for p in (tmp_path / "fuseopt_debug" / "step0").iterdir()]
    assert again.SCRIPT not in names
    assert again.GRAPH not in names
