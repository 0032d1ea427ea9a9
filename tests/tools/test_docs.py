"""The pages say what is: README's code runs; its tables and names are the code's.

What docs/numerics.md says is held by test_exceptions.py.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

import fuseopt
from bench import report
from bench.environment import environment
from bench.reading import readings
from demo.own import OWN
from fuseopt.compiler import again, dump
from fuseopt.config import CHOICES, Config, resolve
from tests import ROOT

README = ROOT / "README.md"
TAIL = ROOT / "docs" / "tail.md"
BACKWARD = ROOT / "docs" / "backward.md"
STORAGE = ROOT / "docs" / "storage.md"
USAGE = ROOT / "docs" / "usage.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def table(page: Path, heading: str) -> list[list[str]]:
    """Cells of the first table below a heading, without the table's own header."""
    below = text(page).split(f"\n## {heading}\n", 1)[1]
    block = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    assert block is not None
    lines = block[0].strip().split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# ---------------------------------------------------------------- README


def test_the_code_runs_and_compiles() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text(README), re.DOTALL)
    assert "import fuseopt" not in code
    names: dict[str, object] = {}
    exec(code, names)
    (report,) = fuseopt.reports()
    assert (report.launches, report.lanes, report.fallback) == (1, 2, "")


def test_the_code_of_the_page_on_tails_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text(TAIL), re.DOTALL)
    assert len(blocks) >= 3
    for code in blocks:
        exec(code, {})
        # a step that clips is one launch more than its norm
        last = 1 if "defer=" in code else 2
        assert fuseopt.reports()[-1].launches == last


def test_the_code_of_the_page_on_steps_in_backward_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text(BACKWARD), re.DOTALL)
    assert len(blocks) == 3
    for code in blocks:
        exec(code, {})
        assert {(r.launches, r.fallback) for r in fuseopt.reports()} == {(1, "")}


def test_the_code_of_the_page_on_storage_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text(STORAGE), re.DOTALL)
    assert len(blocks) == 5
    for code in blocks:
        names: dict[str, Any] = {}
        exec(code, names)
        for _ in range(2):
            for p in names["model"].parameters():
                p.grad = torch.ones_like(p)
            names["optimizer"].step()
        assert (fuseopt.reports()[-1].launches, fuseopt.reports()[-1].fallback) == (
            1,
            "",
        )


def test_the_options_are_those_of_config() -> None:
    rows = table(USAGE, "Options")
    assert [quoted(row[0]) for row in rows] == [[f.name] for f in fields(Config)]
    for field, row in zip(fields(Config), rows, strict=True):
        values = [eval(value) for value in quoted(row[1])]
        known = CHOICES.get(field.name, ())
        if field.name == "debug":
            values = list(range(values[0], values[1] + 1))
        assert tuple(values) == known
        assert eval(quoted(row[2])[0]) == field.default


def test_the_variables_are_read() -> None:
    values = {
        "target": "triton",
        "debug": "3",
        "dump_dir": "a",
        "cache_dir": "b",
        "check": "True",
        "cudagraphs": "require",
        "raw_fields": "False",
        "eager_if_faster": "False",
        "batch_bytes": "1024",
        "compile_debug": "1",
    }
    found = {quoted(r[0])[0]: quoted(r[3]) for r in table(USAGE, "Options") if r[3]}
    assert found.keys() == values.keys()
    environ = {names[0]: values[option] for option, names in found.items()}
    config = resolve(None, None, environ)
    values["compile_debug"] = "True"
    assert {o: str(getattr(config, o)) for o in values} == values


def test_the_dumped_files_and_their_levels() -> None:
    levels = {
        name: int(row[1])
        for row in table(USAGE, "Looking inside")
        for name in quoted(row[0])
    }
    assert levels == {
        "report.txt": 1,
        "not_fused.txt": dump.REFUSALS,
        "0_captured.txt": dump.PASSES,
        "1_scheduled.txt": dump.PASSES,
        "kernel0.cpp": dump.SOURCES,
        "kernel0.py": dump.SOURCES,
        "kernel0.layout.txt": dump.SOURCES,
        again.GRAPH: dump.SOURCES,
        again.SCRIPT: dump.SOURCES,
    }


def test_the_tables_are_those_of_the_results() -> None:
    """To mend: `python -m bench report`."""
    found = readings()
    for page, make in ((README, report.short), (report.PAGE, report.long)):
        assert report.filled(text(page), make(found)) == text(page)


def test_the_table_is_one_screen() -> None:
    block = report.BLOCK.search(text(README))
    assert block is not None
    assert block[0].count("\n") < 24


def test_results_name_no_machine() -> None:
    for reading in readings():
        known = {*environment(), "gpu", "gpu_memory_gib", "gpu_toolkit"}
        assert reading.environment.keys() <= known


# ---------------------------------------------------------------- all pages


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", text(ROOT / "Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^ *|`)make ([a-z-]+)", text(page), re.MULTILINE))
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)", text(page)):
        assert "://" in link or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_names_of_the_package_exist(page: Path) -> None:
    for name in re.findall(r"`fuseopt\.(\w+)", text(page)):
        places = (f"{name}.py", f"{name}/__init__.py")
        module = any((ROOT / "fuseopt" / place).exists() for place in places)
        assert module or hasattr(fuseopt, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_lines_of_prose_are_short(page: Path) -> None:
    measured = report.BLOCK.sub("", text(page))
    for line in measured.split("\n"):
        assert len(line) <= 88 or line.startswith("|"), line


@pytest.mark.slow
def test_the_demo_trains_and_draws(tmp_path: Path) -> None:
    """`make demo`, in short: the benchmarks' turns that it uses had changed once."""
    command = [sys.executable, "-m", "demo.train_gpt2", "--quick", "--steps", "3"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list(tmp_path.glob("*.png"))
    assert "the two runs are the same bits" in " ".join(done.stdout.split())
    for what in ("AdamW step", OWN, f"{OWN}, and its tail"):
        assert f"{what} on" in " ".join(done.stdout.split())
    assert {x.name for x in (tmp_path / "kernels").iterdir()} >= {"step0", "step2"}
