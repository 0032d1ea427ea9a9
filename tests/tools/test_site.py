"""The site: every page is in its menu, every public name and message in its pages."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import fuseopt
from fuseopt.backward.handle import InBackward
from fuseopt.compiler.report import (
    KernelReport,
    PartReport,
    Report,
    VariantReport,
)
from fuseopt.tails.outcome import Outcome
from fuseopt.tails.tail import Tail
from tests import ROOT
from tests.tools import stages_page

DOCS = ROOT / "docs"
MENU = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
CODE = "\n".join(p.read_text("utf-8") for p in (ROOT / "fuseopt").rglob("*.py"))


def text(name: str | Path) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_page_is_in_the_menu() -> None:
    found = re.findall(r": ([\w-]+\.md)$", MENU, re.MULTILINE)
    assert sorted(found) == sorted(p.name for p in DOCS.glob("*.md"))


def test_every_public_name_is_in_the_api() -> None:
    found = re.findall(r"^::: fuseopt\.(\w+)$", text("api.md"), re.MULTILINE)
    # `fuseopt.fuseopt` is the backend, which torch finds by its name
    assert {*fuseopt.__all__} - {"__version__", "fuseopt"} <= {*found}


#: Classes whose objects the public functions return, and the page that tells of them.
GIVEN = {
    Report: "api.md",
    KernelReport: "api.md",
    VariantReport: "api.md",
    PartReport: "api.md",
    Outcome: "tail.md",
    Tail: "tail.md",
    InBackward: "backward.md",
}


@pytest.mark.parametrize("kind", GIVEN, ids=lambda kind: kind.__name__)
def test_every_public_attribute_is_told_of(kind: type) -> None:
    """By a docstring of its own, by that of its class, or on the class's page."""
    own = {name for name in vars(kind) if not name.startswith("_")}
    own |= {*inspect.get_annotations(kind)} | {*getattr(kind, "__slots__", ())}
    code = inspect.getsource(kind)
    own |= {*re.findall(r"^        self\.([a-z]\w*)(?:: \w+)? = ", code, re.MULTILINE)}
    told = f"{inspect.getdoc(kind)}\n{text(GIVEN[kind])}"
    for name in sorted(own):
        documented = isinstance(vars(kind).get(name), (property, types.FunctionType))
        if documented and vars(kind)[name].__doc__:
            continue
        inherited = any(name in vars(base) for base in kind.__mro__[1:])
        assert inherited or re.search(rf"\b{name}\b", told), f"{kind.__name__}.{name}"


def test_every_public_name_says_what_it_is() -> None:
    for name in {*fuseopt.__all__} - {"__version__"}:
        assert len(inspect.getdoc(getattr(fuseopt, name)) or "") > 20, name
    for name, kind in vars(fuseopt.errors).items():
        if isinstance(kind, type):
            assert kind.__doc__, name


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))],
    ids=lambda page: page.name,
)
def test_links_lead_to_headings(page: Path) -> None:
    for file, heading in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text(page)):
        there = page.parent / file if file else page
        if there.suffix == ".md":
            assert heading in headings(there.read_text(encoding="utf-8")), heading


def headings(page: str) -> set[str]:
    """What headings of a page are called in links."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"(?s)```.*?```", "", page), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", x.lower()) for x in found]
    return {x.strip().replace(" ", "-") for x in plain}


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
