"""Kernels that came with the package, for machines without a compiler.

`make wheel` builds the kernels of common steps for three levels of x86-64, which all
processors of some year have. They lie in a folder for each level, named as kernels of
the cache are: by their text and all that they depend on. The text holds no shape and no
number, so one kernel serves every model. Where no compiler is found, the best level
that this processor has is looked through first.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
from pathlib import Path

from ...codegen import Source
from .toolchain import flags_of, name_of, processor

log = logging.getLogger("fuseopt")

FOLDER = Path(__file__).with_name("kernels")
#: By level, the best one first: the features, as Linux names them, that it has above
#: the levels below it (x86-64 psABI, "Micro-Architecture Levels").
LEVELS = {
    "x86-64-v4": frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split()),
    "x86-64-v3": frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split()),
    "x86-64-v2": frozenset("cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3".split()),
}
#: Part of the name of each kernel, where those of the cache have their compiler.
IDENTITY = "built with the package"
#: The OpenMP of torch is in the process, under one name or another: a library that asks
#: for it by name might be given a second one, or none.
LIBRARIES = ("-nodefaultlibs", "-lm", "-lc", "-lgcc", "-s")
THROWING_LIBRARIES = ("-nodefaultlibs", "-lstdc++", "-lm", "-lc", "-lgcc_s", "-lgcc")


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
    if platform.machine() != "x86_64" or os.name != "posix":
        return ()
    return levels_of(frozenset(processor().split()))


def levels_of(features: frozenset[str]) -> tuple[str, ...]:
    """The levels that a processor of these features has. A level has all below it."""
    found: list[str] = []
    for level, needed in reversed(LEVELS.items()):
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
        return ctypes.CDLL(str(path))
    except OSError as error:
        log.warning("a kernel of the package cannot be loaded (%s)", error)
        return None


def count() -> int:
    """How many kernels came with the package for the best level of this processor."""
    if not levels():
        return 0
    return sum(1 for _ in (FOLDER / levels()[0]).glob("*.so"))
