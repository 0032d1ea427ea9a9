"""Without rich, jinja2 and pygments: Reports, pages and commands are there, plain."""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

import fuseopt
from fuseopt.cli.main import main
from fuseopt.compiler.report import Report
from fuseopt.compiler.text import plain_table, wrapped
from tests import ROOT
from tests.compiler.test_page import Total, params, read

EXTRA = ("rich", "jinja2", "pygments")
#: The only modules that import what is in the extra.
SHOWING = {"compiler/text.py", "compiler/report.py", "compiler/page.py"}
SHOWING |= {"cli/printed.py"}
#: What comes with a package that is required, or with jinja2.
COMES_ALONG = {"numpy", "markupsafe", "fuseopt"}


def block(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let an import of these packages fail, as where they are not installed."""
    for name in [*sys.modules]:
        if name.split(".")[0] in names:
            monkeypatch.setitem(sys.modules, name, None)
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    block(monkeypatch, *EXTRA)
    with pytest.raises(ImportError):
        __import__("rich.console")


def test_what_is_required_is_little() -> None:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    required = [
        Requirement(line.split("#")[0])
        for line in parser["options"]["install_requires"].splitlines()
        if line.split("#")[0].strip()
    ]
    assert [x.name for x in required] == ["torch", "triton", "filelock", "platformdirs"]
    extra = parser["options.extras_require"]["report"].split()
    assert extra == [*EXTRA]


def roots(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module.split(".")[0]


def test_nothing_else_is_imported() -> None:
    required = {"torch", "triton", "filelock", "platformdirs"}
    showing = set()
    for path in (ROOT / "fuseopt").rglob("*.py"):
        name = str(path.relative_to(ROOT / "fuseopt"))
        if name.startswith("integrations/"):
            continue  # each is for one package, which its user has
        found = {*roots(path)} - sys.stdlib_module_names - required - COMES_ALONG
        assert found <= {*EXTRA}, name
        showing |= {name} if found else set()
    assert showing <= SHOWING


def test_a_report_is_a_text(bare: None) -> None:
    report = fuseopt.explain(torch.optim.AdamW(params()))
    lines = str(report).splitlines()
    assert lines[0].startswith("fuseopt: 1 launch a step, 4 lanes, ")
    assert "kernel0: target cpp, lanes 4, variants 1, elements 128, " in str(report)
    assert any(line.startswith("seconds: decide 0.") for line in lines)
    assert max(map(len, lines)) <= 88


def test_both_forms_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word, but for the table of kernels."""
    report = fuseopt.explain(Total(params()))
    assert report.not_fused
    drawn = str(report)
    block(monkeypatch, *EXTRA)
    plain = str(report)
    kept = [x for x in drawn.splitlines() if x[:1] not in "┏┃┡│└"]
    told = [x for x in plain.splitlines() if not x.startswith("kernel")]
    assert " ".join(told).split() == " ".join(kept).split()
    assert plain.count("kernel0: ") == plain.count("kernel1: ") == 1
    assert "─" in drawn
    assert "─" not in plain


def test_a_report_of_a_fallback(bare: None) -> None:
    report = Report(fallback="no C++ compiler was found")
    first = str(report).splitlines()[0]
    assert first == "fuseopt: not compiled. no C++ compiler was found"


def test_a_page_is_a_text_with_the_sources(bare: None, tmp_path: Path) -> None:
    report = fuseopt.explain(Total(params()))
    report.save_html(tmp_path / "step.html")
    text = read((tmp_path / "step.html").read_text(encoding="utf-8")).text
    assert "2 launches a step" in text
    assert "shared_scalar" in text
    assert text.count("struct Table") >= 2
    cell = report._repr_html_()
    assert "struct Table" not in cell
    assert "2 launches a step" in read(cell).text


@pytest.mark.slow
def test_a_page_without_colours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """jinja2 comes with torch: so this is the page that most users have."""
    report = fuseopt.explain(Total(params()))
    report.save_html(tmp_path / "colours.html")
    block(monkeypatch, "pygments")
    report.save_html(tmp_path / "none.html")
    pages = [
        read((tmp_path / name).read_text(encoding="utf-8")).text
        for name in ("colours.html", "none.html")
    ]
    assert "&lt;" in (tmp_path / "none.html").read_text(encoding="utf-8")
    assert pages[0].split() == pages[1].split()


def test_a_cache_is_listed(
    bare: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "ls"]) == 0
    assert "kernels in " in capsys.readouterr().out


def test_a_plain_table_folds_its_last_column() -> None:
    rows = [("ok", "torch", "2.13.0"), ("warn", "cache", "a word\n-> and another one")]
    assert [*plain_table(rows, 80)] == [
        "ok    torch  2.13.0",
        "warn  cache  a word",
        "             -> and another one",
    ]
    narrow = [*plain_table(rows, 20)]
    assert narrow[:2] == ["ok  torch", "  2.13.0"]
    assert max(map(len, narrow)) <= 20
    assert [*plain_table([], 80)] == []


def test_an_empty_line_stays() -> None:
    assert [*wrapped("a\n\nb c", 3)] == ["a", "", "b c"]


@pytest.mark.slow
def test_the_commands_run_without_them(tmp_path: Path) -> None:
    """In a process in which nothing has imported them before."""
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.modules.update(dict.fromkeys({EXTRA!r}))\n"
    )
    (tmp_path / "file.py").write_text(
        "import torch\nopt = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))])\n"
    )
    command = [sys.executable, "-m", "fuseopt"]
    for arguments, told in (
        (["doctor"], "a step on cpu"),
        (["explain", "file.py:opt", "--html", "page.html"], "1 launch a step"),
    ):
        done = subprocess.run(
            [*command, *arguments],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
            | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert told in done.stdout
    assert "struct Table" in (tmp_path / "page.html").read_text(encoding="utf-8")
