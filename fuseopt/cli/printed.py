"""Print tables and Reports: with rich if it is installed, else as plain text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..compiler.text import WIDTH, columns, plain_table, rich_console

if TYPE_CHECKING:
    from ..compiler.report import Report

#: The colour of a cell with exactly this text.
COLOURS = {
    **dict.fromkeys(("ok", "equal"), "green"),
    "warn": "yellow",
    **dict.fromkeys(("fail", "differs", "raises", "proves nothing"), "red"),
}


def print_table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells. `names`: the headings of the columns, or empty."""
    console = _console()
    if console is None:
        every = [*([names] if names else []), *rows]
        print(*plain_table(every, columns()), sep="\n")
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(names), pad_edge=False)
    for name in names or [""] * max(map(len, rows), default=0):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, COLOURS.get(cell, "")) for cell in row))
    console.print(table)


def print_report(report: Report) -> None:
    """Print a Report, as wide as the terminal."""
    console = _console()
    if console is None:
        print(report.plain(columns()))
    else:
        console.print(report)


def _console() -> Any | None:
    console = rich_console()
    if console is not None and not console.is_terminal:
        return rich_console(no_color=True, width=WIDTH)
    return console


def print_json(content: object) -> None:
    """Print one JSON object."""
    print(json.dumps(content, default=str))
