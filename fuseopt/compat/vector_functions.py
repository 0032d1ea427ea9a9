"""The vector functions from which eager's kernels on a CPU take exp, log and others.

With MKL, eager takes some functions from MKL, whose functions take arrays, and others
from Sleef, whose functions take whole vectors. Without MKL, all are Sleef's.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from collections.abc import Sequence
from typing import Any

import torch

from .capability import probed
from .libraries import torch_library
from .names import Missing

#: Names of processors: those with vectors of 32 bytes or more, and those of 16.
X86 = ("x86_64", "AMD64", "i686")
ARM = ("aarch64", "arm64")


class LibraryStruct(ctypes.Structure):
    """Mirrors `struct Library` of the generated C++."""

    _fields_ = [
        ("sqrt_f32", ctypes.c_void_p),
        ("sqrt_f64", ctypes.c_void_p),
        ("newton", ctypes.c_int64),
        ("functions", ctypes.c_void_p),
        ("vector", ctypes.c_int64),
        ("vendor", ctypes.c_int64),
    ]


@probed(
    "vector-library",
    "kernels of the CPU call the vector functions that eager calls",
    "steps that take logarithms or exponentials of tensors run in eager on a CPU",
    bits=True,
    expected=platform.machine() not in (*X86, *ARM),
)
def VECTORS() -> None:
    try:
        torch_library("libtorch_cpu", ctypes.CDLL)
    except OSError as error:
        raise Missing(str(error)) from None
    machine, registers = platform.machine(), torch.backends.cpu.get_cpu_capability()
    if machine not in (*X86, *ARM):
        raise Missing(f"fuseopt calls no vector functions on {machine} yet")
    if machine in ARM and registers != "DEFAULT":
        raise Missing(f"fuseopt calls no functions for {registers} registers yet")
    if not has_vendor() and not all(_addresses((sleef("exp", "_u10", True),))):
        raise Missing("torch exports neither MKL's nor Sleef's functions")


@functools.cache
def has_vendor() -> bool:
    """Does libtorch_cpu export MKL's functions, which eager then calls?"""
    return all(_addresses(("vmsSqrt", "vmdSqrt")))


def sleef(function: str, accuracy: str, single: bool) -> str:
    """Return Sleef's name of a function of this processor's vectors."""
    lanes = ("f4", "d2") if platform.machine() in ARM else ("f8", "d4")
    return f"Sleef_{function}{lanes[not single]}{accuracy}"


def _addresses(symbols: Sequence[str]) -> Any:
    """Return addresses of functions that libtorch_cpu exports; 0 for missing ones."""
    functions = (ctypes.c_void_p * max(1, len(symbols)))()
    try:
        library = torch_library("libtorch_cpu", ctypes.CDLL)
    except OSError:
        return functions
    for k, symbol in enumerate(symbols):
        function = getattr(library, symbol, None) if symbol else None
        if function is not None:
            functions[k] = ctypes.cast(function, ctypes.c_void_p).value
    return functions


@functools.cache
def vector_library(symbols: tuple[str, ...] = ()) -> LibraryStruct:
    """Return the vector functions that eager's CPU kernels call, in the order of
    `symbols`.

    Relies on libtorch_cpu exporting the names of MKL and Sleef. Otherwise generated
    code calls the functions of the C library, and correctly rounded roots.
    """
    roots = _addresses(("vmsSqrt", "vmdSqrt"))
    registers = torch.backends.cpu.get_cpu_capability()
    vector = 64 if registers == "AVX512" else 32
    if registers == "DEFAULT" and platform.machine() not in X86:
        vector = 16  # NEON's
    functions = _addresses(symbols)
    struct = LibraryStruct(roots[0], roots[1], 0, 0, vector, has_vendor())
    struct.functions, struct.kept = ctypes.addressof(functions), functions
    return struct
