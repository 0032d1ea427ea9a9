"""Lines of generated Python: moved to the right, over several where too long; the
lines that take a ticket.
"""

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


def take(counter: str, total: str) -> list[str]:
    """Take a ticket of a counter: `last` says whether `total` are taken with it.

    It releases what came before the barrier above it, and acquires what the others
    released: who takes the last one sees what all have written.
    """
    return [
        f'taken = tl.atomic_add({counter}, 1, sem="acq_rel", scope="gpu")',
        f"last = taken == {total} - 1",
    ]


def give_back(counter: str) -> str:
    """Make a counter fit for the next launch."""
    return f"tl.store({counter}, 0)  # for the next launch"
