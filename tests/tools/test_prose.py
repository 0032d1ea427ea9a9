"""The sentences of the pages keep the rules; `make lint` checks the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ROOT
from tests.tools.prose import (
    PAGES,
    WORDS,
    code_faults,
    comments,
    faults,
    header_comments,
    header_faults,
    headers,
    modules,
    sentences,
)

LONG = " ".join(["word"] * (WORDS + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_sentences_of_a_page_keep_the_rules(page: Path) -> None:
    assert faults(page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "module", modules(), ids=lambda path: str(path.relative_to(ROOT / "fuseopt"))
)
def test_docstrings_and_comments_keep_the_rules(module: Path) -> None:
    assert [*code_faults(module.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("header", headers(), ids=lambda path: path.name)
def test_comments_of_headers_keep_the_rules(header: Path) -> None:
    assert [*header_faults(header.read_text(encoding="utf-8"))] == []


def test_all_pages_are_checked() -> None:
    found = {*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")}
    assert found == {*PAGES}


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


@pytest.mark.parametrize(
    "source",
    [
        f'"""Module. {LONG}."""',
        f'def f():\n    """Return x.\n\n    {LONG}.\n    """',
        f"x = 1  # {LONG}",
        f"# {LONG[:40]}\n# {LONG[40:]}",
        '"""What a step is."""',
        '"""Whether a step is one."""',
        'def f() -> int:\n    """Is it one?"""',
        "# is it one?\nx = 1",
        '"""The number that Dynamo knows."""',
        "# the trace says so",
        "x = 1  # it was asked for the number",
        "# Dynamo asked for it",
        "# nobody reads it",
    ],
)
def test_a_fault_of_code_is_found(source: str) -> None:
    assert len([*code_faults(source)]) == 1


@pytest.mark.parametrize(
    "source",
    [
        'def f() -> bool:\n    """Is it one?"""',
        'def f() -> TypeGuard[int]:\n    """Is it one? Return False else."""',
        '"""The number, as `told`, which the user knows."""',
        f"x = {LONG.split()!r}",
        f"x = 1  # noqa: {LONG}",
        f"# {LONG[:60]}\nx = 1  # {LONG[:60]}\n# {LONG[:60]}",
        f"# {LONG[:60]}\n#\n# {LONG[:60]}",
    ],
)
def test_code_that_keeps_the_rules_has_no_fault(source: str) -> None:
    assert [*code_faults(source)] == []


def test_adjacent_lines_are_one_comment() -> None:
    source = "# one\n# two\nx = 1  # three\n# four\n\n#: five\n"
    assert [*comments(source)] == ["one\ntwo", "three", "four", "five"]


def test_comments_of_headers() -> None:
    source = (
        "// Is it one?\nbool one();\nint n;  // three\n"
        "        // four\n  // five\n  int m;\n"
    )
    assert [*header_comments(source)] == [
        ("Is it one?", True),
        ("three\nfour", False),
        ("five", False),
    ]
    assert [*header_faults(source)] == []
    assert len([*header_faults(f"// {LONG}\n// and more\nint n;")]) == 1
    assert len([*header_faults("// Is it one?\nint one();")]) == 1
