"""What a variable of the environment makes of kernels is nobody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuseopt.runtime.cpp import toolchain
from fuseopt.runtime.folders import chosen
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


def test_the_folder_where_platformdirs_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert chosen(None) == str(tmp_path / ".cache/fuseopt")
    assert chosen("/else") == "/else"


STEP = """
import sys
sys.modules["platformdirs"] = sys.modules["expecttest"] = None
import torch, fuseopt
p = torch.nn.Parameter(torch.ones(8))
optimizer = fuseopt.compile(torch.optim.SGD([p], lr=0.5), fallback="error")
p.grad = torch.ones(8)
optimizer.step()
assert p.detach().tolist() == [0.5] * 8
(report,) = fuseopt.reports()
assert report.launches == 1 and not report.fallback
"""


@pytest.mark.slow
def test_a_step_is_compiled_where_neither_is_installed(tmp_path: Path) -> None:
    """And does not run in eager, with a warning that few read."""
    env = {**os.environ, "HOME": str(tmp_path)}
    env.pop("FUSEOPT_CACHE_DIR", None)
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", STEP]
    subprocess.run(command, env=env, check=True, timeout=250)
    assert (tmp_path / ".cache/fuseopt").is_dir()
