"""What a variable of the environment makes of kernels is nobody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseopt.runtime.cpp import toolchain
from tests.runtime.test_toolchain import key, script

VARIABLES = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
)


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with another header, library and assembler than the system's."""
    (tmp_path / "math.h").write_text("#define sqrt(x) (0)\n")
    (tmp_path / "libm.so").write_text("no library")
    script(tmp_path / "as", 'exec /usr/bin/as "$@"')
    return tmp_path


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_planted_folder_changes_the_key(
    variable: str, planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that were built with it are not found without it."""
    keys = []
    for value in ("", f"{planted}/", ""):
        if value:
            monkeypatch.setenv(variable, value)
        else:
            monkeypatch.delenv(variable, raising=False)
        toolchain._identified.cache_clear()
        keys.append(key())
    toolchain._identified.cache_clear()
    assert keys[0] == keys[2]
    assert keys[0] != keys[1]
