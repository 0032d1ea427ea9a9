"""Folders of dumps: names that are not ASCII, and several who write at once."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fuseopt.compiler.dump import new_folder
from tests import ROOT

FILES = {
    "0_captured.txt",
    "1_scheduled.txt",
    "not_fused.txt",
    "kernel0.cpp",
    "kernel0.layout.txt",
    "report.txt",
    "graph.pickle",
    "repro.py",
}
#: A step whose lanes are too many to be listed: the dump has a sign for what is left.
PROGRAM = """
import sys, warnings
warnings.simplefilter("error", UserWarning)
import torch, fuseopt
from {module} import Größe

params = [torch.nn.Parameter(torch.ones(k % 7 + 1)) for k in range(60)]
for p in params:
    p.grad = torch.ones_like(p)
step = torch.compile(
    Größe(params).step,
    backend="fuseopt",
    options={"dump_dir": sys.argv[1], "debug": 4, "fallback": "error"},
)
step()
assert params[0].tolist() == [0.5]
(report,) = fuseopt.reports()
assert report.dump_dir.startswith(sys.argv[1]), report.dump_dir
"""
OPTIMIZER = """
import torch

class Größe(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-0.5)
"""


def started(
    place: Path, folder: str, module: str = "größe", **variables: str
) -> subprocess.Popen[bytes]:
    (place / f"{module}.py").write_text(OPTIMIZER, encoding="utf-8")
    program = PROGRAM.replace("{module}", module)
    (place / "program.py").write_text(program, encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(place)])
    return subprocess.Popen(
        [sys.executable, "program.py", folder],
        cwd=place,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stderr=subprocess.PIPE,
    )


def ended(process: subprocess.Popen[bytes]) -> str:
    told = process.communicate(timeout=240)[1].decode(errors="replace")
    assert process.returncode == 0, told
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "variables"),
    [
        ("größe", {}),
        # where names are ASCII, Python imports no others
        ("plain", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
    ids=["utf-8", "ascii"],
)
def test_names_that_are_not_ascii(
    module: str, variables: dict[str, str], tmp_path: Path
) -> None:
    """The folder's, the file's and the optimizer's; in a locale that has ASCII alone
    files are UTF-8 all the same.
    """
    told = ended(started(tmp_path, str(tmp_path / "ausgabe ✓"), module, **variables))
    folder = tmp_path / "ausgabe ✓" / "step0"
    assert {x.name for x in folder.iterdir()} == FILES
    scheduled = (folder / "1_scheduled.txt").read_text(encoding="utf-8")
    assert "…" in scheduled
    assert "details in " in told
    captured = (folder / "0_captured.txt").read_text(encoding="utf-8")
    assert f"{module}.py" in captured


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """A byte that is no UTF-8, as older disks have them."""
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/st\xfcck")
    made = new_folder(folder)
    assert os.fsencode(made).endswith(b"/st\xfcck/step0")


def test_links_that_are_there_already(tmp_path: Path) -> None:
    """What somebody else has put there is neither followed nor written to."""
    precious, elsewhere = tmp_path / "precious", tmp_path / "elsewhere"
    precious.write_text("precious")
    elsewhere.mkdir()
    (elsewhere / "report.txt").symlink_to(precious)
    folder = tmp_path / "dump"
    folder.mkdir()
    (folder / "step0").symlink_to(elsewhere)
    (folder / "step1").symlink_to(tmp_path / "nowhere")
    assert new_folder(str(folder)) == folder / "step2"
    assert [x.name for x in elsewhere.iterdir()] == ["report.txt"]
    assert precious.read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_threads_that_make_folders_at_once_share_none(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: new_folder(str(tmp_path)), range(200)))
    assert len({*made}) == 200
    assert {x.name for x in made} == {f"step{k}" for k in range(200)}


@pytest.mark.slow
def test_processes_that_dump_into_one_folder(tmp_path: Path) -> None:
    """Each has folders of its own, in which all files are whole."""
    folder = tmp_path / "dump"
    places = [tmp_path / f"process{k}" for k in range(3)]
    for place in places:
        place.mkdir()
    for process in [started(place, str(folder)) for place in places]:
        ended(process)
    steps = sorted(folder.iterdir())
    assert [x.name for x in steps] == ["step0", "step1", "step2"]
    for step in steps:
        assert {x.name for x in step.iterdir()} == FILES
        assert "details" not in (step / "report.txt").read_text(encoding="utf-8")
    kernels = {(step / "kernel0.cpp").read_bytes() for step in steps}
    assert len(kernels) == 1
