"""Does a kernel's own square root give the bits of eager's vector library?

Eager takes float32 roots from a library whose algorithm depends on the processor. A
kernel holds one such algorithm, much faster because it is inlined and twice as wide; it
is used only if it agrees with the library on a battery of numbers: many significands in
every binade, denormals, zeros, infinities, NaN.
"""

from __future__ import annotations

import ctypes
from array import array

from ...codegen.optable import SYMBOLS
from ...compat import LibraryStruct, vector_library

#: `LIBRARY_MODE` of the generated source.
MODE = 0x140102


def battery() -> array[int]:
    """Bit patterns of float32 numbers: 64 significands in each of 256 binades."""
    bits = array("I")
    state = 0x9E3779B9
    for exponent in range(256):
        for k in range(64):
            state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
            significand = (0, 1, 0x7FFFFF)[k] if k < 3 else state >> 9
            bits.append(exponent << 23 | significand)
    bits.extend((0x80000000, 0x80000001, 0xBF800000, 0xFF800000))  # -0, negatives
    # one past the range where the library refines an estimate, and the last before it
    bits.extend((0x7F7FEFFF, 0x7F7FF000, 0x7F7FF001, 0x7F7FFFFF))
    return bits


def agrees(kernel: ctypes.CDLL, library: LibraryStruct) -> bool:
    """Is `newton_sqrt_f32` of a loaded kernel equal to the library's root?"""
    if not library.sqrt_f32:
        return False
    bits = battery()
    n = len(bits)
    ours, theirs = array("I", bytes(4 * n)), array("I", bytes(4 * n))
    source = bits.buffer_info()[0]
    newton = kernel.newton_sqrt_f32
    newton.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    newton.restype = ctypes.c_int64
    if not newton(n, source, ours.buffer_info()[0]):
        return False
    kind = ctypes.CFUNCTYPE(
        None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong
    )
    kind(library.sqrt_f32)(n, source, theirs.buffer_info()[0], MODE)
    return all(
        a == b or (_nan(a) and _nan(b)) for a, b in zip(ours, theirs, strict=True)
    )


def _nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


class Vectors:
    """The vector functions handed to kernels, tested once per process."""

    def __init__(self) -> None:
        self._struct: LibraryStruct | None = None

    def address(self, kernel: ctypes.CDLL) -> int:
        """Address of the `struct Library` to launch with."""
        if self._struct is None:
            struct = LibraryStruct.from_buffer_copy(vector_library(SYMBOLS))
            struct.newton = int(agrees(kernel, struct))
            self._struct = struct
        return ctypes.addressof(self._struct)
