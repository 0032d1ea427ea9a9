"""words.h, for the helper that all steps share; its structs and functions."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...codegen.cpp.structs import fields

TEXT = Path(__file__).with_suffix(".h").read_text("utf-8")


class Addresses(ctypes.Structure):
    """Destinations of the addresses of a kernel's table."""

    _fields_ = fields(TEXT, "Addresses")


class Numbers(ctypes.Structure):
    """Destinations of numbers of the CPU."""

    _fields_ = fields(TEXT, "Numbers")


class DeviceTables(ctypes.Structure):
    """All tables of a step on one device."""

    _fields_ = fields(TEXT, "DeviceTables")


class SavedMemory(ctypes.Structure):
    """Memory of the CPU, and room for a copy of its contents."""

    _fields_ = fields(TEXT, "SavedMemory")


class HelperCall(functools.partial[Any]):
    """Function of the helper, bound to a struct whose arrays it keeps alive."""

    struct: Any
    arrays: Mapping[str, array[int]]

    def __new__(
        cls,
        struct: Any,
        function: Any,
        arrays: Mapping[str, array[int]],
        others: tuple[Any, ...],
        result: Any = None,
    ) -> HelperCall:
        """Write the addresses of `arrays` to the struct. `others`: the types of the
        arguments after it.
        """
        for name, a in arrays.items():
            setattr(struct, name, a.buffer_info()[0])
        function.argtypes = [ctypes.c_void_p, *others]
        function.restype = result
        self = super().__new__(cls, function, ctypes.addressof(struct))
        self.struct, self.arrays = struct, arrays
        return self

    @property
    def at(self) -> int:
        """The address of the struct."""
        return ctypes.addressof(self.struct)
