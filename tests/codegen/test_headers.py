"""The C++ that kernels have in common: each file compiles, and without a warning."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from fuseopt.codegen.cpp.headers import FOLDER, header
from fuseopt.runtime.cpp.toolchain import find_compiler

#: In the order in which a kernel has them; each may use those before it.
ORDER = [
    *("prelude", "functions", "halves", "bits", "quotients", "walk", "blocks", "folds"),
    *("pieces", "rows", "folding", "modes", "driver"),
]
#: Functions that a kernel does not call are no fault of a header.
WARNINGS = [
    *("-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion"),
    *("-Wno-unused-function", "-Wno-unused-variable"),
]


def test_all_files_are_named() -> None:
    assert {path.stem for path in FOLDER.glob("*.h")} == set(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_a_header_compiles_without_a_warning(name: str, tmp_path: Path) -> None:
    own = tmp_path / "all.cpp"
    own.write_text("\n".join(map(header, ORDER[: ORDER.index(name) + 1])))
    command = [find_compiler().path, "-std=c++17", "-fsyntax-only", "-fopenmp"]
    done = subprocess.run(
        [*command, "-march=native", *WARNINGS, "-Werror", str(own)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
