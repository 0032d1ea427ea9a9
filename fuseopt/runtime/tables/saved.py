"""saved.h, for the helper that all steps share: numbers of the CPU that an error gets
back, copied by their addresses.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Sequence
from pathlib import Path

from ...codegen.cpp.structs import fields

TEXT = Path(__file__).with_suffix(".h").read_text("utf-8")


class SavedStruct(ctypes.Structure):
    """The places of what is saved."""

    _fields_ = fields(TEXT, "Saved")


class Places:
    """Dense memory of the CPU that a plan writes, by positions in a pool of addresses.

    `bytes_`: the size of each. `helper`: the library of the guards.
    """

    def __init__(
        self,
        positions: Sequence[int],
        bytes_: Sequence[int],
        pool: array[int],
        helper: ctypes.PyDLL,
    ) -> None:
        self._arrays = array("q", positions), array("q", bytes_)
        position, sizes = (a.buffer_info()[0] for a in self._arrays)
        self._struct = SavedStruct(n=len(positions), position=position, bytes=sizes)
        self.size = sum(bytes_)
        at, words = ctypes.addressof(self._struct), pool.buffer_info()[0]
        for function in (helper.fuseopt_save, helper.fuseopt_put_back):
            function.argtypes, function.restype = [ctypes.c_void_p] * 3, None
        self.save = functools.partial(helper.fuseopt_save, at, words)
        self.put_back = functools.partial(helper.fuseopt_put_back, at, words)


class Saved:
    """A context in which an error has memory get back what it held before.

    `done()` is called when all is written; an error after that puts nothing back.
    """

    def __init__(self, places: Places) -> None:
        self.places = places
        self.copy = ctypes.create_string_buffer(places.size)
        self.written: list[bool] = []
        self.done = functools.partial(self.written.append, True)

    def __enter__(self) -> Saved:
        self.places.save(self.copy)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self.written:
            self.places.put_back(self.copy)
