"""Checks the sentences of the pages: python -m tests.tools.prose, as `make lint` does.

A page breaks a rule where a sentence has more than 25 words, or holds a phrase of
`PHRASES`, such as "is told" of code. Blocks of code are left out. Text in backquotes is
one word. A cell of a table is a sentence too, and a semicolon ends it. A list of names
may be long: what has a comma after two of five words.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tests import ROOT

#: The most words of a sentence.
WORDS = 25

#: A pattern, and what to write instead.
PHRASES = {
    r"\b(?:is|are|was|were|be|been|being)(?: \w+ly| not| never| then)?"
    r" (?:asked|told|said|known)\b": "the active voice: fuseopt checks, reports, reads",
    r"\bof (?:its|their|one's) own\b": "`its own x`, or nothing",
    r"\bas ever\b": "`as before`, or nothing",
    r"\bto be had\b": "`available`",
}

#: Written from docstrings; checked once these keep the rules.
DERIVED = {"modules.md"}

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    ROOT / "SECURITY.md",
    *(p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in DERIVED),
]


class Fault(NamedTuple):
    """A sentence that breaks a rule."""

    sentence: str
    rule: str


def faults(page: str) -> list[Fault]:
    """Return what breaks a rule in the Markdown of a page."""
    return [fault for text in sentences(page) for fault in faults_of(text)]


def faults_of(sentence: str) -> Iterator[Fault]:
    """Yield the rules that a sentence breaks, each with the sentence."""
    count = len(words(sentence))
    if count > WORDS and sentence.count(",") < 0.4 * count:
        yield Fault(sentence, f"{count} words, at most {WORDS}")
    for pattern, better in PHRASES.items():
        found = re.search(pattern, sentence, re.IGNORECASE)
        if found is not None:
            yield Fault(sentence, f"{found[0]!r}; better: {better}")


def words(sentence: str) -> list[str]:
    """Return the words of a sentence; one in backquotes is one."""
    return re.findall(r"\S*\w\S*", sentence)


def sentences(page: str) -> Iterator[str]:
    """Yield the sentences of a page: of its paragraphs, list items and cells."""
    page = re.sub(r"^ *```.*?^ *```", "\n", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"<!--.*?-->", "\n\n", page, flags=re.DOTALL)
    for block in _blocks(page):
        text = re.sub(r"!?\[([^\]]*)\](?:\([^)]*\))?", r"\1", " ".join(block.split()))
        text = re.sub(r"(`+)(.+?)\1", lambda m: _one_word(m[2]), text)
        for sentence in re.split(r"(?<=[.!?])[\"')*_]*\s+(?=\S)", text):
            if words(sentence):
                yield sentence


def _one_word(code: str) -> str:
    """Return code without blanks and stops, so that it ends no sentence."""
    return "`" + re.sub(r"\W+", "_", code) + "`"


def _blocks(page: str) -> Iterator[str]:
    """Yield what ends where a line is empty, or where another item or cell begins."""
    block: list[str] = []
    listed = False
    for line in [*page.split("\n"), ""]:
        stripped = line.strip()
        item = re.match(r"\s*(?:[-*]|\d+\.)\s+(.*)", line)
        code = line.startswith("    ") and not listed and not block
        if stripped.startswith(("|", "#", ":::", "%%")) or not stripped or item or code:
            yield " ".join(block)
            block = []
        if item:
            listed, block = True, [item[1]]
        elif stripped.startswith("|"):
            for cell in re.split(r"(?<!\\)\|", stripped):
                yield from re.split(r";\s", cell)
        elif stripped.startswith("#"):
            yield stripped.lstrip("# ")
        elif stripped and not code:
            listed = listed and line.startswith(" ")
            block.append(stripped)


def main() -> int:
    """Print the faults of all pages; return 1 if there is one."""
    count = 0
    for page in PAGES:
        for sentence, rule in faults(page.read_text(encoding="utf-8")):
            print(f"{page.relative_to(ROOT)}: {rule}\n    {sentence}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
