"""Checks the sentences of pages and code: python -m tests.tools.prose, in `make lint`.

A page breaks a rule where a sentence has more than 25 words, or holds a phrase of
`PHRASES`, such as "is told" of code. Blocks of code are left out. Text in backquotes is
one word. A cell of a table is a sentence too, and a semicolon ends it. A list of names
may be long: what has a comma after two of five words.

Docstrings and comments of the package keep these rules and `CODE_PHRASES`. So do the
comments of the headers in C++. A docstring begins with a verb or a noun. A question
belongs to a function that returns a bool.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
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

PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]

#: Like `PHRASES`, for docstrings and comments. Only people say, ask, tell, know, see.
CODE_PHRASES = {
    r"(?<!user )(?<!users )(?<!caller )(?<!reader )(?<!`)\b"
    r"(?:says|asks|tells|told|knows|sees)\b": "code reports, checks, reads, compares",
    r"\b(?:Dynamo|fuseopt|torch|autograd|Triton|Inductor|Python|it|which|that)"
    r" (?:said|asked|knew|saw)\b": "code reports, checks, reads, compares",
    r"\bwhat of (?:it|a|the)\b": "name the part",
    r"\bone's\b": "name whose it is",
    r"\b(?:nobody|somebody|whoever|whom)\b": "name the actor",
    r"\bnobody's\b": "`without an owner`",
    r"(?<!`)\bapart from\b": "`except`",
}

#: A docstring that begins so is a riddle.
RIDDLE = re.compile(
    r"(?:what|whatever|whether|which|how|where|who|whom|whose|why|when|that|if|it|there"
    r"|they|these|those|and|or|of|else|not|to|as|so)\b",
    re.IGNORECASE,
)


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


def code_faults(source: str) -> Iterator[Fault]:
    """Yield what breaks a rule in the docstrings and comments of a module."""
    for text, may_ask in docstrings(source):
        if RIDDLE.match(text):
            first = text.split("\n\n")[0]
            yield Fault(first, "a docstring begins with a verb or a noun")
        yield from _faults_of_code(text, may_ask)
    for text in comments(source):
        yield from _faults_of_code(text, may_ask=False)


def header_faults(source: str) -> Iterator[Fault]:
    """Yield what breaks a rule in the comments of a header in C++."""
    for text, may_ask in header_comments(source):
        yield from _faults_of_code(text, may_ask)


def header_comments(source: str) -> Iterator[tuple[str, bool]]:
    """Yield the comments of a header, and whether the next line has the type bool.
    Adjacent lines with a comment in one column are one.
    """
    block: list[str] = []
    last = -1
    for line in [*source.split("\n"), ""]:
        code, found, text = line.partition("//")
        alone = found and not code.strip()
        if block and not (alone and len(code) == last):
            yield "\n".join(block), "bool" in code
            block = []
        if found:
            block.append(text.strip())
            last = len(code)


def _faults_of_code(text: str, may_ask: bool) -> Iterator[Fault]:
    for sentence in sentences(text):
        yield from faults_of(sentence)
        for pattern, better in CODE_PHRASES.items():
            found = re.search(pattern, sentence)
            if found is not None:
                yield Fault(sentence, f"{found[0]!r}; better: {better}")
        if re.search(r"\?[\"')]*$", sentence.strip()) and not may_ask:
            yield Fault(sentence, "a question, but the function returns no bool")


def docstrings(source: str) -> Iterator[tuple[str, bool]]:
    """Yield each docstring of a module, and whether its function returns a bool."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(
            node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        ):
            text = ast.get_docstring(node)
            returns = getattr(node, "returns", None)
            if text:
                may_ask = returns is not None and bool(
                    re.search(r"\b(?:bool|TypeGuard)\b", ast.unparse(returns))
                )
                yield text, may_ask


def comments(source: str) -> Iterator[str]:
    """Yield the comments of a module; adjacent lines of comments alone are one."""
    block: list[str] = []
    last = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#:").strip()
        line, column = token.start
        alone = not token.line[:column].strip()
        if block and not (alone and (line - 1, column) == last):
            yield "\n".join(block)
            block = []
        if not re.match(r"(?:type: ignore|noqa|pragma|mypy:)", text):
            block.append(text)
        last = (line, column) if alone else (0, 0)
    if block:
        yield "\n".join(block)


def modules() -> list[Path]:
    """Return the modules of the package."""
    return sorted((ROOT / "fuseopt").rglob("*.py"))


def headers() -> list[Path]:
    """Return the headers in C++."""
    return sorted((ROOT / "fuseopt").rglob("*.h"))


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
    """Print the faults of all pages and modules; return 1 if there is one."""
    found = [(x, fault) for x in PAGES for fault in faults(x.read_text("utf-8"))]
    for module in modules():
        text = module.read_text(encoding="utf-8")
        found += [(module, fault) for fault in code_faults(text)]
    for header in headers():
        text = header.read_text(encoding="utf-8")
        found += [(header, fault) for fault in header_faults(text)]
    for path, (sentence, rule) in found:
        print(f"{path.relative_to(ROOT)}: {rule}\n    {sentence}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
