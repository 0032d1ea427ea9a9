"""Lines of generated Python: indentation, wrapping, and taking a ticket."""

from __future__ import annotations


def indent(lines: list[str], levels: int = 1) -> list[str]:
    """Indent lines, except empty ones."""
    return [f"{'    ' * levels}{line}" if line else line for line in lines]


def over_lines(head: str, args: list[str], close: str) -> list[str]:
    """Return a call or a signature, wrapped if it is too long for a line."""
    line = f"{head}{', '.join(args)}{close}"
    if len(line) <= 84:
        return [line]
    return [head, *(f"    {a}," for a in args), close]


def take(counter: str, total: str) -> list[str]:
    """Return lines that take a ticket: `last` is true for ticket number `total`.

    The operation releases the writes before the barrier above it, and acquires those
    that others released. So the program with the last ticket reads all writes.
    """
    return [
        f'taken = tl.atomic_add({counter}, 1, sem="acq_rel", scope="gpu")',
        f"last = taken == {total} - 1",
    ]


def give_back(counter: str) -> str:
    """Return the line that resets a counter for the next launch."""
    return f"tl.store({counter}, 0)  # for the next launch"
