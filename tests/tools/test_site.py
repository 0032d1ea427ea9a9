"""The site: every page is in its menu, every public name and message in its pages."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fuseopt
from tests import ROOT
from tests.tools import stages_page

DOCS = ROOT / "docs"
MENU = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
CODE = "\n".join(p.read_text("utf-8") for p in (ROOT / "fuseopt").rglob("*.py"))


def text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_menu() -> None:
    found = re.findall(r": ([\w-]+\.md)$", MENU, re.MULTILINE)
    assert sorted(found) == sorted(p.name for p in DOCS.glob("*.md"))


def test_every_public_name_is_in_the_api() -> None:
    found = re.findall(r"^::: fuseopt\.(\w+)$", text("api.md"), re.MULTILINE)
    # `fuseopt.fuseopt` is the backend, which torch finds by its name
    assert {*fuseopt.__all__} - {"__version__", "fuseopt"} <= {*found}


@pytest.mark.parametrize("name", ["index.md", "stages.md"])
def test_the_code_of_a_page_runs(name: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", text(name), re.DOTALL)
    exec(code, {})
    report = fuseopt.reports()[-1]
    assert (report.launches, report.lanes, report.fallback) == (1, 2, "")


def test_each_message_is_one_of_the_package() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", text("messages.md"), re.MULTILINE)
    assert len(rows) >= 10
    unbroken = re.sub(r'"\s*\n\s*f?"', "", CODE)
    assert [row for row in rows if row not in unbroken] == []


def test_the_stages_are_what_the_tool_writes() -> None:
    """To mend: `python -m tests.tools.stages_page`. What a kernel looks like depends on
    the processor, so of what is dumped the first lines are compared.
    """
    now, told = stages_page.page(), text("stages.md")
    assert outside_of_dumps(now) == outside_of_dumps(told)
    assert len(dumps(now)) == len(dumps(told)) == 6
    for ours, theirs in zip(dumps(now), dumps(told), strict=True):
        assert ours.split("\n")[0].split(";")[0] == theirs.split("\n")[0].split(";")[0]


def outside_of_dumps(page: str) -> str:
    return re.sub(r"```(text|cpp)\n.*?```", "", page, flags=re.DOTALL)


def dumps(page: str) -> list[str]:
    return re.findall(r"```\w+\n(.*?)```", page, re.DOTALL)


def test_links_out_of_the_site_are_names_there() -> None:
    spec = importlib.util.spec_from_file_location("site_links", DOCS / "site_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    given = "[`x.py`](../examples/x.py), [tail](tail.md) and [a](../b.md#c)"
    wanted = "`x.py` (`examples/x.py`), [tail](tail.md) and a (`b.md#c`)"
    assert module.on_page_markdown(given, page=None) == wanted


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed"
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert all(f'id="fuseopt.{name}"' in api for name in ("compile", "tail", "explain"))
