"""rows.h, for the helper that all steps share: choose the lanes of a launch."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...codegen.cpp.structs import fields

TEXT = Path(__file__).with_suffix(".h").read_text("utf-8")


class RowsStruct(ctypes.Structure):
    """All lanes of a table, and the arrays that a launch reads."""

    _fields_ = fields(TEXT, "Rows")


class Rows:
    """All lanes of a table; `keep` writes those of a launch to the arrays that it
    reads.

    `owners` gives each lane its place in the argument of `keep`. `position`, `row`,
    `start`, `strided` are the arrays of the table, which has all lanes now and whose
    arrays never move. `lanes` is the address of the number of lanes. `helper` is the
    library of the guards, None to write in Python.
    """

    def __init__(
        self,
        owners: Sequence[int],
        position: array[int],
        row: array[int],
        start: array[int],
        strided: array[int],
        lanes: int,
        helper: ctypes.PyDLL | None,
    ) -> None:
        n = len(owners)
        counts = array("q", [start[i + 1] - start[i] for i in range(n)])
        self._owners = array("q", owners)
        self._from = position[:], row[:], counts, strided[:]
        self._to = position, row, start, strided
        self._lanes = lanes
        self._slots = len(position) // n if n else 0
        self._call: Callable[[int, bytes | None], Any] | None = None
        if helper is None:
            return
        names = (
            *("owner", "position", "row", "counts", "strided"),
            *("to_position", "to_row", "to_start", "to_strided"),
        )
        arrays = self._owners, *self._from, *self._to
        places = {k: a.buffer_info()[0] for k, a in zip(names, arrays, strict=True)}
        self._struct = RowsStruct(n=n, slots=self._slots, lanes=lanes, **places)
        call = helper.fuseopt_rows
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_char_p], None
        self._call = call

    def keep(self, taking: bytes | None) -> None:
        """Keep only lanes whose owner has a 1 in `taking`. None keeps all lanes."""
        if self._call is not None:
            self._call(ctypes.addressof(self._struct), taking)
            return
        of = enumerate(self._owners)
        chosen = [i for i, k in of if taking is None or taking[k]]
        position, row, counts, strided = self._from
        to_position, to_row, to_start, to_strided = self._to
        for m, i in enumerate(chosen):
            for s in range(self._slots):
                to_position[m * self._slots + s] = position[i * self._slots + s]
            to_row[m], to_strided[m] = row[i], strided[i]
            to_start[m + 1] = to_start[m] + counts[i]
        ctypes.c_int64.from_address(self._lanes).value = len(chosen)
