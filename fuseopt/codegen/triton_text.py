"""Lines of generated Python: moved to the right, or over several where too long."""

from __future__ import annotations


def indent(lines: list[str], levels: int = 1) -> list[str]:
    """Lines moved to the right, empty ones as they are."""
    return [f"{'    ' * levels}{line}" if line else line for line in lines]


def over_lines(head: str, args: list[str], close: str) -> list[str]:
    """A call or a signature, over several lines where one is too long."""
    line = f"{head}{', '.join(args)}{close}"
    if len(line) <= 84:
        return [line]
    return [head, *(f"    {a}," for a in args), close]
