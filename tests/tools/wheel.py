"""`make wheel`: the wheel, with the kernels of common steps built into it.

    python -m tests.tools.wheel --out dist
    python -m tests.tools.wheel --out dist --only AdamW Lion   # of few steps
    python -m tests.tools.wheel --out dist --machine aarch64   # by a cross compiler

The kernels are built here, for three levels of x86-64 or for aarch64.
The wheel is for Linux and glibc 2.29 or later, which `check` holds the libraries to:
they ask for no symbol of a newer one, and for no library but those of C, C++ and GCC.
"""

from __future__ import annotations

import argparse
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tests import ROOT
from tests.tools.matrix import SOURCES, copied, done
from tests.tools.prebuilt import add_machine, build_all

PLATFORM = "manylinux_2_29"
GLIBC = (2, 29)
#: The version of the C++ library that GCC 5 brought.
GLIBCXX = (3, 4, 21)
LIBRARIES = {"libm.so.6", "libc.so.6", "libgcc_s.so.1", "libstdc++.so.6"}
#: The loader itself, which GCC for aarch64 names.
LIBRARIES |= {"ld-linux-aarch64.so.1"}
#: Where the kernels lie in the package.
KERNELS = Path("fuseopt/runtime/cpp/kernels")


def check(library: Path) -> None:
    """Raise ValueError if a library needs what the platform does not promise."""
    command = ["readelf", "--wide", "--dynamic", "--version-info", str(library)]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", told))
    if not needed <= LIBRARIES:
        raise ValueError(f"{library.name} needs {sorted(needed - LIBRARIES)}")
    for name, most in (("GLIBC", GLIBC), ("GLIBCXX", GLIBCXX)):
        for found in re.findall(rf"\b{name}_([\d.]+)", told):
            if tuple(map(int, found.split("."))) > most:
                raise ValueError(f"{library.name} needs {name}_{found}")


def wheel(
    out: Path, only: Iterable[str] = (), machine: str = platform.machine()
) -> Path:
    """Build the kernels, then the wheel; its path."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        sources = Path(work)
        for name in SOURCES:
            copied(ROOT / name, sources / name)
        kernels = build_all(sources / KERNELS, only, machine)
        for library in (sources / KERNELS).rglob("*.so"):
            check(library)
        before = {*out.glob("*.whl")}
        plat = f"--build-option=--plat-name={PLATFORM}_{machine}"
        command: list[str | Path] = [sys.executable, "-m", "pip", "wheel", "--no-deps"]
        command += ["--no-build-isolation", "--config-settings", plat, "-w", out]
        done([*command, sources], "the wheel is not built")
        (built,) = {*out.glob("*.whl")} - before or before
    print(f"{built}: {kernels} kernels a level, {built.stat().st_size / 1e6:.1f} MB")
    return built


def main() -> None:
    """Build it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    add_machine(parser)
    given = parser.parse_args()
    wheel(given.out, given.only, given.machine)


if __name__ == "__main__":
    main()
