"""The examples run, as scripts and as notebooks, and do what they show."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
MARK = "# the one line"
#: What a script needs, where it is not the plain loop.
NEEDS = {
    "accelerate_loop": ["accelerate"],
    "lightning_module": ["lightning"],
    "timm_training": ["timm"],
    "torchrl_learner": ["torchrl"],
    "transformers_trainer": ["transformers", "accelerate"],
}
#: Runs a script as itself; timm is imported where torchvision cannot be.
RUN = """
import runpy, sys
if "timm" in sys.argv[1]:
    from tests.wild.without_torchvision import stand_ins
    with stand_ins():
        import timm.optim, timm.utils, timm.models.vision_transformer
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def test_each_logger_is_told_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages are stood in for: what they are called with is what counts."""
    script = runpy.run_path(str(EXAMPLES / "watched_training.py"))
    told: dict[str, float] = {}
    writer = SimpleNamespace(add_scalar=lambda key, x, step: told.update({key: x}))
    run = SimpleNamespace(log=lambda found, step: told.update(found))
    board = SimpleNamespace(SummaryWriter=lambda folder: writer)
    weights = SimpleNamespace(init=lambda **given: run)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board)
    monkeypatch.setitem(sys.modules, "wandb", weights)
    numbers = {"a.b": {"norm": 1.0, "count": 0.0}, "c": {"norm": 2.0, "count": 3.0}}
    for log in (script["tensorboard_logger"]("runs"), script["wandb_logger"]("name")):
        told.clear()
        log(7, 4.5, numbers)
        want = {"norm/a.b": 1.0, "count/a.b": 0.0, "norm/c": 2.0, "count/c": 3.0}
        assert told == {"total_norm": 4.5, **want}


def by_name(path: Path) -> str:
    return path.stem


@pytest.mark.family(3)
@pytest.mark.parametrize("path", SCRIPTS, ids=by_name)
def test_a_script_compiles_the_step(path: Path, tmp_path: Path) -> None:
    """In one launch, a tail in two; and fuseopt has nothing to warn of."""
    for package in NEEDS.get(path.stem, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make wild)")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    launches = 2 if "fuseopt.tail" in path.read_text("utf-8") else 1
    said = rf"launches of a step: {launches}, for \d+ parameters"
    assert re.search(said, done.stdout)
    assert "fuseopt" not in done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=by_name)
def test_one_line_is_marked(path: Path) -> None:
    """It is the one by which fuseopt gets at the step."""
    lines = path.read_text(encoding="utf-8").splitlines()
    marked = [line for line in lines if line.endswith(MARK)]
    assert len(marked) == 1
    imports = ["import fuseopt"]
    imports += [x for x in lines if x.startswith("from fuseopt.integrations.")]
    names = ["fuseopt.compile", "fuseopt.tail", *(x.split()[-1] for x in imports[1:])]
    assert any(f"{name}(" in marked[0] for name in names)
    asked = [x for x in lines if "fuseopt" in x and "reports" not in x]
    assert {*asked, *marked} == {*imports, *marked}


def test_all_trainers_have_an_example() -> None:
    own = {"plain_loop", "watched_training"}
    assert {path.stem for path in SCRIPTS} == {*own, *NEEDS}


def cells(path: Path, kind: str) -> list[str]:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == kind]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow) if "own" in path.stem else path
        for path in NOTEBOOKS
    ],
    ids=by_name,
)
def test_the_cells_of_a_notebook_run(path: Path) -> None:
    """They are plain Python, and assert what the text says."""
    names: dict[str, object] = {"__name__": "__main__"}
    code = cells(path, "code")
    assert any("assert" in cell for cell in code)
    threads = torch.get_num_threads()
    try:
        for cell in code:
            exec(cell, names)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_a_notebook_runs_in_jupyter(path: Path) -> None:
    for package in ("nbclient", "ipykernel"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make wild)")
    code = (
        "import sys, nbformat, nbclient\n"
        "book = nbformat.read(sys.argv[1], 4)\n"
        "nbclient.NotebookClient(book, timeout=200).execute()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_what_a_notebook_shows_is_clean(path: Path) -> None:
    """All cells were run, in their order; no error, no warning, no place of a file."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    run = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in run] == [*range(1, len(run) + 1)]
    outputs = [output for cell in run for output in cell["outputs"]]
    assert {o["output_type"] for o in outputs} <= {"stream", "execute_result"}
    assert all(o.get("name", "stdout") == "stdout" for o in outputs)
    assert str(Path.home()) not in json.dumps(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=by_name)
def test_lines_of_text_are_short(path: Path) -> None:
    for text in cells(path, "markdown"):
        assert all(len(line) <= 88 for line in text.splitlines())
