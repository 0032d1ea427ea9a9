"""The sentences of the pages keep the rules; `make lint` checks the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.prose import PAGES, WORDS, faults, sentences

LONG = " ".join(["word"] * (WORDS + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_sentences_of_a_page_keep_the_rules(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


def test_all_pages_are_checked() -> None:
    found = {*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")}
    # its sentences are docstrings
    assert found - {*PAGES} == {ROOT / "docs" / "modules.md"}


def test_lint_checks_the_sentences() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    lint = makefile.split("\nlint:", 1)[1].split("\n\n", 1)[0]
    assert "python -m tests.tools.prose" in lint


@pytest.mark.parametrize(
    "page",
    [
        f"{LONG}.",
        f"Short. {LONG}. Short.",
        f"Two lines: {LONG[:40]}\n{LONG[40:]}.",
        f"- an item\n- {LONG}",
        f"1. {LONG}",
        f"| {LONG} | short |",
        f"## {LONG}",
        f"[{LONG}](there.md).",
        "It is told the number.",
        "They were never asked.",
        "A dict is then known by its name.",
        "It has an order of its own.",
        "It works as ever.",
        "Every torch that is to be had.",
    ],
)
def test_a_fault_is_found(page: str) -> None:
    assert len(faults(page)) == 1


@pytest.mark.parametrize(
    "page",
    [
        "It has its own order, and fuseopt reports it. You may ask for more.",
        f"```\n{LONG}\n```",
        f"    {LONG}",
        f"- an item:\n\n```python\n{LONG}\n```",
        f"One `{LONG}` counts once.",
        f"One. {LONG[:60]}. {LONG[:60]}. {LONG[:60]}",
        f"| {LONG[:60]}; {LONG[:60]}; {LONG[:60]} |",
        ", ".join(["Name"] * 40),
        f"<!-- {LONG} -->",
    ],
)
def test_what_keeps_the_rules_is_no_fault(page: str) -> None:
    assert faults(page) == []


def test_a_link_and_code_do_not_hide_the_end_of_a_sentence() -> None:
    page = "One `a.b`. Two [c](d.md). (Three.) **Four.** Five"
    assert [x.strip("()*") for x in sentences(page)] == [
        "One `a_b`.",
        "Two c.",
        "Three.",
        "Four.",
        "Five",
    ]
