"""words.h, for the helper that all steps share; its structs and functions."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Mapping
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


class HelperCall:
    """Struct with its arrays, and a function of the helper that takes it."""

    def __init__(
        self,
        struct: Any,
        function: Any,
        arrays: Mapping[str, array[int]],
        others: tuple[Any, ...],
        result: Any = None,
    ) -> None:
        self.struct = struct
        self.arrays = arrays
        for name, a in arrays.items():
            setattr(struct, name, a.buffer_info()[0])
        function.argtypes = [ctypes.c_void_p, *others]
        function.restype = result
        self._function: Callable[..., Any] = function
        self.at = ctypes.addressof(struct)

    def __call__(self, *others: int) -> Any:
        return self._function(self.at, *others)
