"""Kernels of the package, for machines without a compiler.

`make wheel` builds the kernels of common steps for three levels of x86-64, or for
aarch64. All processors after some year have a given level. Each level has a folder. A
kernel's name is built as in the cache: from its text and all that it depends on. The
text holds no shape and no number, so one kernel serves every model. Without a compiler,
the best level of this processor is searched first.
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
#: By machine and level, the best one first: the features, as Linux names them, which
#: the levels below lack (x86-64 psABI, "Micro-Architecture Levels").
LEVELS = {
    "x86_64": {
        "x86-64-v4": frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split()),
        "x86-64-v3": frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()),
        "x86-64-v2": frozenset("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split()),
    },
    "aarch64": {"armv8-a": frozenset({"fp", "asimd"})},
}
#: Part of the name of each kernel, in the place of the compiler's identity.
IDENTITY = "built with the package"
#: Arguments without OpenMP. torch's OpenMP is in the process, under some name. A
#: library that requires it by name may get a second one, or none.
LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc", "-s")
THROWING_LIBRARIES = ("-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc")
#: A function of every OpenMP.
ENTRY = "omp_get_num_threads"


def libraries(source: Source) -> tuple[str, ...]:
    """Return the arguments after the source."""
    return THROWING_LIBRARIES if source.throws else LIBRARIES


def key(source: Source, fast: bool, level: str) -> str:
    """Return the name of the library of a source."""
    all_arguments = " ".join((*flags_of(source, fast, level), *libraries(source)))
    return name_of(source.text, IDENTITY, all_arguments, level)


@functools.cache
def levels() -> tuple[str, ...]:
    """Return the levels that this processor has, the best one first."""
    if os.name != "posix":
        return ()
    return levels_of(platform.machine(), frozenset(processor().split()))


def levels_of(machine: str, features: frozenset[str]) -> tuple[str, ...]:
    """Return the levels of a processor with these features, with all below them."""
    found: list[str] = []
    for level, needed in reversed(LEVELS.get(machine, {}).items()):
        if not needed <= features:
            break
        found.insert(0, level)
    return tuple(found)


def path_of(source: Source, fast: bool) -> Path | None:
    """Return the library of a source for this processor; None if there is none."""
    for level in levels():
        path = FOLDER / level / f"{key(source, fast, level)}.so"
        if path.is_file():
            return path
    return None


def load(path: Path) -> ctypes.CDLL | None:
    """Load a library of the package; return None, with a warning, if that fails."""
    try:
        share_openmp()
        return ctypes.CDLL(str(path))
    except (OSError, AttributeError) as error:  # no such library or function
        log.warning("a kernel of the package cannot be loaded (%s)", error)
        return None


@functools.cache
def share_openmp() -> None:
    """Let libraries that are loaded later find the OpenMP that torch calls.

    torch for x86-64 shares it, and torch for aarch64 does not. The address of a
    function gives its file, which has many names.
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
    """Location of an address: `Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("start", ctypes.c_void_p),
    )


def count() -> int:
    """Return the number of the package's kernels for this processor's best level."""
    if not levels():
        return 0
    return sum(1 for _ in (FOLDER / levels()[0]).glob("*.so"))
