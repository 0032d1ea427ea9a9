"""Update an arena's words: those of many tables, in one C call."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from .upload import Arena
from .words import DeviceTables as Struct
from .words import HelperCall


class TableFields(NamedTuple):
    """Fields of a table that `fuseopt_update_arena` needs.

    `addresses`, `numbers`, `lanes`, `first_cell` are addresses, 0 for no numbers.
    `lanes_at`, `cells_at` are words of the arena.
    """

    addresses: int
    numbers: int
    lanes: int
    first_cell: int
    lanes_at: int
    cells_at: int


class ArenaTable(Protocol):
    """A table with words in an arena."""

    def part(self) -> TableFields | None:
        """Return the table's TableFields; None where there is no compiled helper."""

    def refresh(self) -> None:
        """Write the addresses that changed."""

    def fetch(self) -> None:
        """Write the numbers of the CPU that changed."""


def updater(
    helper: ctypes.PyDLL | None,
    arena: Arena,
    tables: Sequence[ArenaTable],
    pool: array[int],
) -> Callable[[], object]:
    """Return a function that writes all changes of these tables to their arena."""
    parts = [table.part() for table in tables]
    fields = [part for part in parts if part is not None]
    if helper is None or len(fields) < len(parts):
        return functools.partial(_by_python, tables)
    struct = Struct(n=len(fields), words=len(pool), pool=pool.buffer_info()[0], stale=1)
    struct.range = arena.range.buffer_info()[0]
    names = TableFields._fields
    columns = zip(*fields, strict=True)
    arrays = {k: array("Q", v) for k, v in zip(names, columns, strict=True)}
    arrays["known"] = array("Q", bytes(8 * len(pool)))
    helper_call = HelperCall(
        struct, helper.fuseopt_update_arena, arrays, (), ctypes.c_int64
    )
    arena.when_stale.append(functools.partial(setattr, struct, "stale", 1))
    return helper_call


def _by_python(tables: Sequence[ArenaTable]) -> None:
    for table in tables:
        table.fetch()
        table.refresh()
