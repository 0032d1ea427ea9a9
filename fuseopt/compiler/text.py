"""Text for a terminal or a pipe, with rich's console if rich is installed.

rich, jinja2 and pygments are the extra `report`. Only code that shows a Report or the
output of a command uses them.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

#: The width of output that does not go to a terminal, in columns.
WIDTH = 100
#: A last column narrower than this moves to its own line.
NARROW = 24


def rich_console(**options: Any) -> Any | None:
    """Return a console of rich; None if rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(highlight=False, **options)


def columns() -> int:
    """Return the width of the terminal that stdout is, or that of a pipe."""
    if not sys.stdout.isatty():
        return WIDTH
    return shutil.get_terminal_size().columns


def wrapped(text: str, width: int, indent: str = "") -> Iterator[str]:
    """Yield the lines of a text, none wider than `width`, each after `indent`."""
    for line in text.splitlines() or [""]:
        yield from textwrap.wrap(
            line, max(width, 1), initial_indent=indent, subsequent_indent=indent
        ) or [indent.rstrip()]


def plain_table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of a table whose last column is folded."""
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
