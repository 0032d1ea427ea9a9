"""Kernels for aarch64, run by an emulator beside torch's own aarch64 build.

`python -m tests.tools.aarch64 --make` fetches what is needed; without it these tests
are skipped, with the name of what is missing.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from fuseopt.runtime.cpp import prebuilt
from tests.tools import aarch64
from tests.tools import wheel as tool
from tests.tools.test_wheel import README

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(bool(aarch64.missing()), reason=aarch64.missing() or "there"),
]
ONLY = ("AdamW torch.float32", "Lion torch.float32 lion_pytorch")


def verified(*arguments: str, **more: str) -> list[dict[str, object]]:
    """The results of `python -m fuseopt verify` there."""
    environment = aarch64.environment(aarch64.ROOT, **more)
    command = ["-m", "fuseopt", "verify", *arguments, "--json"]
    done = aarch64.run(*command, env=environment)
    begin = done.stdout.find("{")
    assert begin >= 0, done.stderr
    return json.loads(done.stdout[begin:])["results"]  # type: ignore[no-any-return]


def test_it_is_another_processor() -> None:
    """Else nothing below would say anything of aarch64."""
    text = "import platform, torch; print(platform.machine(), torch.ones(2).sum())"
    done = aarch64.run("-c", text)
    assert done.stdout.split() == ["aarch64", "tensor(2.)"], done.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_elementwise_and_reductions(name: str, dtype: str, tmp_path: Path) -> None:
    """Lanes of elements in one launch; norms of rows and columns in several."""
    given = {"FUSEOPT_CACHE_DIR": str(tmp_path)}
    (found,) = verified(f"torch.optim:{name}", "--dtype", dtype, **given)
    assert (found["outcome"], found["reason"]) == ("equal", "")
    assert found["control"]


def test_a_largest_number_is_no_call_of_its_own(tmp_path: Path) -> None:
    """AMSGrad's maximum, whose zeros NEON orders, is in the kernel of its step."""
    given = {"FUSEOPT_CACHE_DIR": str(tmp_path)}
    (found,) = verified("torch.optim:AdamW", "--set", "amsgrad=True", **given)
    assert (found["outcome"], found["launches"]) == ("equal", 1)
    assert found["control"]


def test_every_op(tmp_path: Path) -> None:
    """tests/numerics/test_ops.py: four dtypes. What has another form is an extern."""
    # torch finds backends of installed packages
    installed = Path(str(importlib.metadata.distribution("fuseopt").locate_file("")))
    for folder in installed.glob("fuseopt-*.dist-info"):
        shutil.copytree(folder, tmp_path / folder.name)
    given = {"FUSEOPT_CACHE_DIR": str(tmp_path / "cache")}
    environment = aarch64.environment(aarch64.ROOT, tmp_path, **given)
    command = ["-m", "pytest", "tests/numerics/test_ops.py", "-m", "not gpu", "-q"]
    done = aarch64.run(*command, "-p", "no:cacheprovider", env=environment)
    assert done.returncode == 0, done.stdout[-3000:]


def test_tails_of_three_dtypes() -> None:
    done = aarch64.run("-m", "tests.aarch64.tailed")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [*found] == ["float32", "bfloat16", "float16"]
    assert all(x == [True, True, 2] for x in found.values())


def test_the_wheel_needs_no_compiler(tmp_path: Path) -> None:
    """Its kernels come from the cross compiler; none is on PATH when they run."""
    wheel = tool.wheel(tmp_path / "dist", ONLY, "aarch64")
    assert wheel.name.endswith("_aarch64.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    libraries = [*installed.rglob("*.so")]
    assert {x.parent.name for x in libraries} == {*prebuilt.LEVELS["aarch64"]}
    there = aarch64.environment(installed, PATH="/", HOME=str(tmp_path / "home"))
    del there["CXX"]
    emulator, *words = aarch64.command("-c", README)
    done = subprocess.run(
        [shutil.which(emulator) or emulator, *words],
        cwd=tmp_path,
        env=there,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["AdamW"] == found["Lion"] == [True, 1, 0, ""]
    assert found["file"].startswith(str(installed))
    assert len(found["openmp"]) == 1
