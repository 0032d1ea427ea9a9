"""Text for a terminal or a pipe: rich's console where rich is installed, else plain.

rich, jinja2 and pygments are the extra `report`: nothing but what shows a Report, or
the answer of a command, uses them.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

#: Columns of what is not written to a terminal.
WIDTH = 100
#: A last column narrower than this begins on a line of its own.
NARROW = 24


def rich_console(**options: Any) -> Any | None:
    """A console of rich; None where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False, **options)


def columns() -> int:
    """The width of the terminal that stdout is, or that of a pipe."""
    if not sys.stdout.isatty():
        return WIDTH
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int, indent: str = "") -> Iterator[str]:
    """The lines of a text, none wider than `width`; `indent` is before each."""
    for line in text.splitlines() or [""]:
        yield from textwrap.wrap(
            line, max(width, 1), initial_indent=indent, subsequent_indent=indent
        ) or [indent.rstrip()]


def plain_table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """The lines of a table whose last column is folded."""
    if not rows:
        return
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)][:-1]
    before = sum(widths) + 2 * len(widths)
    for *cells, last in rows:
        padded = [cell.ljust(w) for cell, w in zip(cells, widths, strict=True)]
        if width - before < NARROW:
            yield from wrapped("  ".join(cells), width)
            yield from wrapped(last, width, "  ")
            continue
        start = "  ".join([*padded, ""])
        for line in wrapped(last, width - before):
            yield (start + line).rstrip()
            start = " " * before
