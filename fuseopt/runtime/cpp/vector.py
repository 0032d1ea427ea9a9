"""Compare a kernel's square root with eager's vector library, bit for bit.

Eager takes float32 roots from a library whose algorithm depends on the processor. A
kernel holds one such algorithm, much faster because it is inlined and twice as wide. It
is used only if it agrees with the library on a battery of numbers. The battery has many
significands in every binade, denormals, zeros, infinities, NaN.
"""

from __future__ import annotations

import ctypes
from array import array

import torch

from ...codegen.optable import symbols
from ...compat import VECTORS, LibraryStruct, has_vendor, sleef, vector_library
from ...errors import EagerOnly

#: `LIBRARY_MODE` of the generated source.
MODE = 0x140102


def battery() -> array[int]:
    """Return bits of float32 numbers: 64 significands in each of 256 binades."""
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
    theirs = array("I", bytes(4 * n))
    kind = ctypes.CFUNCTYPE(
        None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_longlong
    )
    source = bits.buffer_info()[0]
    kind(library.sqrt_f32)(n, source, theirs.buffer_info()[0], MODE)
    return _same(_newton(kernel, bits), theirs)


def _newton(kernel: ctypes.CDLL, bits: array[int]) -> array[int] | None:
    """Return the roots of a kernel's `newton_sqrt_f32`; None where it has none."""
    roots = array("I", bytes(4 * len(bits)))
    newton = kernel.newton_sqrt_f32
    newton.argtypes = [ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    newton.restype = ctypes.c_int64
    places = bits.buffer_info()[0], roots.buffer_info()[0]
    return roots if newton(len(bits), *places) else None


def agrees_with_torch(kernel: ctypes.CDLL) -> bool:
    """Is `newton_sqrt_f32` of a loaded kernel equal to `torch.sqrt`? Return False where
    the compiler's root, which rounds correctly, is. Raises EagerOnly where neither is.
    """
    bits = battery()
    numbers = torch.frombuffer(bits, dtype=torch.int32).view(torch.float32)
    theirs = _bits(numbers.sqrt())
    if _same(_newton(kernel, bits), theirs):
        return True
    exact = numbers.double().sqrt().float()  # float64 has digits to spare
    if _same(_bits(exact), theirs):
        return False
    raise EagerOnly(f"torch {torch.__version__} takes roots from an unknown library")


def _bits(t: torch.Tensor) -> array[int]:
    return array("I", ctypes.string_at(t.data_ptr(), 4 * t.numel()))


def _same(ours: array[int] | None, theirs: array[int]) -> bool:
    return ours is not None and all(
        a == b or (_nan(a) and _nan(b)) for a, b in zip(ours, theirs, strict=True)
    )


def _nan(bits: int) -> bool:
    return bits & 0x7FFFFFFF > 0x7F800000


class Vectors:
    """Vector functions that kernels get, tested once per process."""

    def __init__(self) -> None:
        self._struct: LibraryStruct | None = None
        self._bare: LibraryStruct | None = None

    def address(self, kernel: ctypes.CDLL) -> int:
        """Return the address of the `struct Library` to launch with."""
        if self._struct is None:
            if not VECTORS.available():
                return self._without(kernel)
            vendor = has_vendor()
            names = symbols(vendor, sleef)
            struct = LibraryStruct.from_buffer_copy(vector_library(names))
            struct.newton = (
                agrees(kernel, struct) if vendor else agrees_with_torch(kernel)
            )
            self._struct = struct
        return ctypes.addressof(self._struct)

    def _without(self, kernel: ctypes.CDLL) -> int:
        """Return the address of a struct without functions, for other kernels."""
        if self._bare is None:
            struct = LibraryStruct()
            struct.newton = agrees_with_torch(kernel)
            struct.vector = vector_library().vector
            self._bare = struct
        return ctypes.addressof(self._bare)
