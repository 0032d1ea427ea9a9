"""`repro.py` of a dump: the same text in a process that has no model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from fuseopt.compiler import again, alone
from tests import ROOT
from tests.papers import ELEMENTWISE, REDUCING

OF_TORCH = ["AdamW", "NAdam", "Adafactor", "Rprop"]
PAPERS = {kind.__name__: (kind, given) for kind, given in [*ELEMENTWISE, *REDUCING]}


def params() -> list[torch.nn.Parameter]:
    made = [torch.nn.Parameter(torch.randn(s)) for s in [(8, 4), (8,), (4, 4)]]
    for p in made:
        p.grad = torch.randn_like(p)
    return made


def optimizer(name: str) -> Any:
    if name in OF_TORCH:
        return getattr(torch.optim, name)(params())
    kind, given = PAPERS[name]
    return kind(params(), **given)


def dumped(folder: Path, made: Any, **options: Any) -> Path:
    given = {"dump_dir": str(folder), **options}
    report = fuseopt.explain(made, options=given)
    assert not report.fallback
    assert report.dump_dir is not None
    return Path(report.dump_dir)


def repro(folder: Path, *given: str) -> subprocess.CompletedProcess[str]:
    """Run it elsewhere, with Python's own hashing, so that no order comes by chance."""
    # only to run kernels a compiler is looked for
    path = os.environ["PATH"] if given else ""
    return subprocess.run(
        [sys.executable, str(folder / again.SCRIPT), *given],
        env={"PYTHONPATH": str(ROOT), "PATH": path, "HOME": str(folder)},
        cwd=folder.parent,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.family(2)
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


@pytest.mark.family(32)
@pytest.mark.parametrize("name", [*OF_TORCH, *PAPERS])
def test_every_kind_of_graph(name: str, tmp_path: Path, capsys: Any) -> None:
    folder = dumped(tmp_path, optimizer(name))
    assert alone.main(folder) == 0
    assert "the same text" in capsys.readouterr().out


#: Sums make the reference another order of additions, so that bits may differ.
SUMS = {"Adafactor", *(kind.__name__ for kind, _ in REDUCING)}


@pytest.mark.family(15)
@pytest.mark.parametrize("name", [*OF_TORCH, *PAPERS])
def test_kernels_run_alone(name: str, tmp_path: Path, capsys: Any) -> None:
    assert alone.main(dumped(tmp_path, optimizer(name)), ["--run"]) == 0
    said = capsys.readouterr().out.splitlines()
    if name not in SUMS:
        assert "the bits of the reference" in said
    assert re.fullmatch(r"[\d.]+ us, [\d,]+ bytes: [\d.]+ GB/s", said[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tensors_of_other_kinds_are_made_up(
    dtype: torch.dtype, tmp_path: Path, capsys: Any
) -> None:
    whole = torch.randn(9, 7, dtype=dtype)
    held = [
        torch.nn.Parameter(whole[:, 1:4]),
        torch.nn.Parameter(torch.empty(0, 3, dtype=dtype)),
        torch.nn.Parameter(torch.ones((), dtype=dtype)),
    ]
    for p in held:
        p.grad = torch.ones_like(p)
    folder = dumped(tmp_path, torch.optim.SGD(held, momentum=0.9, nesterov=True))
    assert alone.main(folder, ["--run"]) == 0
    assert "the bits of the reference" in capsys.readouterr().out


@pytest.mark.slow
def test_kernels_run_in_a_fresh_process(tmp_path: Path) -> None:
    done = repro(dumped(tmp_path, torch.optim.AdamW(params())), "--run")
    assert done.returncode == 0, done.stderr
    assert "the bits of the reference" in done.stdout


def test_a_kernel_that_is_wrong_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = dumped(tmp_path, torch.optim.AdamW(params()))
    monkeypatch.setattr(alone, "run_schedule", lambda *given, **more: ())
    assert alone.main(folder, ["--run"]) == 1
    assert "from the reference" in capsys.readouterr().out


def test_what_cannot_run_alone_is_told(tmp_path: Path, capsys: Any) -> None:
    matrices = params()[::2]
    folder = dumped(tmp_path, torch.optim.Muon(matrices))
    assert alone.main(folder, ["--run"]) == 2
    assert "between its kernels the graph calls aten.addmm" in capsys.readouterr().out


@pytest.mark.slow
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
