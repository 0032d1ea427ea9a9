"""What the package says of itself is so; the pages on where users come from run."""

from __future__ import annotations

import configparser
import re
from typing import Any

import pytest

import fuseopt
from fuseopt.config import CHECKED
from tests import ROOT
from tests.tools.matrix_page import PAIRS, README, RECORD, read, readme

CITATION = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
COMING_FROM = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", COMING_FROM, re.MULTILINE | re.DOTALL)
)


def metadata() -> dict[str, Any]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    found: dict[str, Any] = dict(parser["metadata"])
    found["classifiers"] = found["classifiers"].strip().splitlines()
    return found


def test_the_pythons_of_the_classifiers_have_run() -> None:
    ran = {x.python for x in read(RECORD) if x.passed}
    start = "Programming Language :: Python :: 3."
    said = {x for x in metadata()["classifiers"] if x.startswith(start)}
    assert said == {f"Programming Language :: Python :: {x}" for x in ran}


def test_readmes_table_of_versions_is_the_matrixs() -> None:
    """To mend: `python -m tests.tools.matrix_page`."""
    text = README.read_text(encoding="utf-8")
    assert readme(text, read(RECORD)) == text
    last = f"{CHECKED[1][0]}.{CHECKED[1][1] - 1}"
    assert f"| {fuseopt.__version__} | {last} |" in text


def test_the_citation_is_of_this_version() -> None:
    said = dict(re.findall(r"^([\w-]+): (.+)$", CITATION, re.MULTILINE))
    assert said["version"] == fuseopt.__version__ == metadata()["version"]
    assert said["license"] == metadata()["license"]
    (author,) = re.findall(r"- name: (.+)", CITATION)
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert author.lower() in licence.lower()


def test_no_address_is_made_up() -> None:
    """There is no public one yet."""
    assert not {"url", "project_urls", "author_email"} & metadata().keys()
    for name in ("CITATION.cff", "SECURITY.md"):
        assert "://" not in (ROOT / name).read_text(encoding="utf-8")


def test_five_places_to_come_from() -> None:
    assert [*SECTIONS] == [
        "torch's `fused=True`",
        "apex",
        "bitsandbytes",
        "heavyball",
        "Inductor",
    ]


@pytest.mark.parametrize("name", SECTIONS, ids=lambda x: x.split()[-1].strip("`"))
def test_the_code_runs_in_as_few_launches_as_it_says(name: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", SECTIONS[name], re.DOTALL)
    names: dict[str, Any] = {"__name__": "coming_from"}
    # a file, since fuseopt reads the text of a step
    import linecache

    file = f"<coming from {name}>"
    linecache.cache[file] = (len(code), None, code.splitlines(keepends=True), file)
    exec(compile(code, file, "exec"), names)
    report = fuseopt.reports()[-1]
    assert report.fallback == ""
    assert report.launches == (2 if "tail" in code else 1)
    if "out" in names:
        assert names["out"].skipped is False or not bool(names["out"].skipped)


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_public_ci_has_what_the_gate_has() -> None:
    texts = {x.stem: x.read_text(encoding="utf-8") for x in WORKFLOWS}
    assert [*texts] == ["lint", "matrix", "test", "wheels"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE)}
    named = re.findall(r"make ([\w-]+)", " ".join(texts.values()))
    (listed,) = re.findall(r"target: \[(.*)\]", texts["test"])
    every = {*named, *listed.split(", ")}
    assert every <= targets
    gate = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert every >= {*gate}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda x: x.stem)
def test_workflows_may_only_read(path: Any) -> None:
    yaml = pytest.importorskip("yaml")
    read_in = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert read_in["permissions"] == {"contents": "read"}
    for job in read_in["jobs"].values():
        assert {"runs-on", "steps"} <= {*job}
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)


def test_the_pairs_of_the_workflow_are_the_matrixs() -> None:
    yaml = pytest.importorskip("yaml")
    text = (ROOT / ".github" / "workflows" / "matrix.yml").read_text(encoding="utf-8")
    given = yaml.safe_load(text)["jobs"]["matrix"]["strategy"]["matrix"]
    pairs = {(p, t) for p in given["python"] for t in given["torch"]}
    pairs |= {(x["python"], x["torch"]) for x in given["include"]}
    assert pairs <= {*PAIRS}
