"""Kernels that came with the package, for machines without a compiler.

`make wheel` builds the kernels of common steps for three levels of x86-64, which all
processors of some year have, or for aarch64. They lie in a folder for each level, named
as kernels of the cache are: by their text and all that they depend on. The text holds
no shape and no number, so one kernel serves every model. Where no compiler is found,
the best level that this processor has is looked through first.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from pathlib import Path

import torch

from ...codegen import Source
from .toolchain import flags_of, name_of, processor

log = logging.getLogger("fuseopt")

FOLDER = Path(__file__).with_name("kernels")
#: By machine and level, the best one first: the features, as Linux names them, that it
#: has above the levels below it (x86-64 psABI, "Micro-Architecture Levels").
LEVELS = {
    "x86_64": {
        "x86-64-v4": frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split()),
        "x86-64-v3": frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()),
        "x86-64-v2": frozenset("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split()),
    },
    "aarch64": {"armv8-a": frozenset({"fp", "asimd"})},
}
#: Part of the name of each kernel, where those of the cache have their compiler.
IDENTITY = "built with the package"
#: The OpenMP of torch is in the process, under one name or another: a library that asks
#: for it by name might be given a second one, or none.
LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc", "-s")
THROWING_LIBRARIES = ("-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc")
#: A function of every OpenMP.
ENTRY = "omp_get_num_threads"


def libraries(source: Source) -> tuple[str, ...]:
    """The arguments after the source."""
    return THROWING_LIBRARIES if source.throws else LIBRARIES


def key(source: Source, fast: bool, level: str) -> str:
    """The name of the library of a source."""
    all_arguments = " ".join((*flags_of(source, fast, level), *libraries(source)))
    return name_of(source.text, IDENTITY, all_arguments, level)


@functools.cache
def levels() -> tuple[str, ...]:
    """The levels that this processor has, the best one first."""
    if os.name != "posix":
        return ()
    return levels_of(platform.machine(), frozenset(processor().split()))


def levels_of(machine: str, features: frozenset[str]) -> tuple[str, ...]:
    """The levels that a processor of these features has. A level has all below it."""
    found: list[str] = []
    for level, needed in reversed(LEVELS.get(machine, {}).items()):
        if not needed <= features:
            break
        found.insert(0, level)
    return tuple(found)


def path_of(source: Source, fast: bool) -> Path | None:
    """The library of a source for this processor; None if the package has none."""
    for level in levels():
        path = FOLDER / level / f"{key(source, fast, level)}.so"
        if path.is_file():
            return path
    return None


def load(path: Path) -> ctypes.CDLL | None:
    """A library of the package; None, with a warning, where it cannot be loaded."""
    try:
        share_openmp()
        return ctypes.CDLL(str(path))
    except (OSError, AttributeError) as error:  # no such library or function
        log.warning("a kernel of the package cannot be loaded (%s)", error)
        return None


@functools.cache
def share_openmp() -> None:
    """Let libraries that are loaded later find the OpenMP that torch calls.

    torch for x86-64 shares it, and torch for aarch64 does not. It is found from the
    address of a function, because its file has many names.
    """
    if hasattr(ctypes.CDLL(None), ENTRY):
        return
    torch_cpu = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    function = getattr(ctypes.CDLL(str(torch_cpu)), ENTRY)
    address = ctypes.cast(function, ctypes.c_void_p)
    found = _Place()
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(found)) and found.file:
        ctypes.CDLL(os.fsdecode(found.file), ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)


class _Place(ctypes.Structure):
    """Where an address lies: `Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
    )


def count() -> int:
    """How many kernels came with the package for the best level of this processor."""
    if not levels():
        return 0
    return sum(1 for _ in (FOLDER / levels()[0]).glob("*.so"))
