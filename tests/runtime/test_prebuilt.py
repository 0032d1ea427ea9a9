"""Kernels of the package: which level a processor has, when one is taken, and what is
said where there is none.
"""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from fuseopt.cli import checks
from fuseopt.codegen import Source
from fuseopt.errors import CompilerMissing
from fuseopt.runtime.cpp import prebuilt
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.cpp.toolchain import COMMON_FLAGS, NATIVE, WIDE, flags_of
from tests.tools.prebuilt import build

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++"),
    pytest.mark.skipif(not prebuilt.levels(), reason="no x86-64 with Linux"),
]
ANSWER = Source("cpp", 'extern "C" int answer() { return 42; }\n', "answer", ())
OTHER = Source("cpp", 'extern "C" int answer() { return 43; }\n', "answer", ())
X86 = prebuilt.LEVELS["x86_64"]
V2, V3, V4 = (X86[f"x86-64-v{n}"] for n in (2, 3, 4))


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernels with one for the best level, and no compiler on PATH."""
    folder = tmp_path / "kernels"
    build(ANSWER, prebuilt.levels()[0], folder)
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return folder


@pytest.mark.parametrize(
    ("features", "levels"),
    [
        (V2 | V3 | V4, 3),
        (V2 | V3, 2),
        (V2 | V3 | (V4 - {"avx512vl"}), 2),
        (V2 | V4, 1),
        (V2 | (V3 - {"f16c"}), 1),
        (V3 | V4, 0),
        (frozenset(), 0),
    ],
)
def test_a_level_needs_all_below_it(features: frozenset[str], levels: int) -> None:
    found = prebuilt.levels_of("x86_64", features)
    assert found == (*X86,)[3 - levels :]


@pytest.mark.parametrize(
    ("machine", "features", "levels"),
    [
        ("aarch64", "fp asimd evtstrm", ("armv8-a",)),
        ("aarch64", "fp", ()),
        ("riscv64", "fp asimd", ()),
        ("aarch64", " ".join(sorted(V2)), ()),
    ],
)
def test_levels_are_of_one_machine(
    machine: str, features: str, levels: tuple[str, ...]
) -> None:
    assert prebuilt.levels_of(machine, frozenset(features.split())) == levels


def test_a_kernel_of_the_package_is_taken(kernels: Path, tmp_path: Path) -> None:
    builder = Builder()
    library = builder.load(ANSWER, str(tmp_path / "cache"), False)
    assert library.answer() == 42
    assert builder.load(ANSWER, str(tmp_path / "cache"), False) is library
    assert (builder.builds, builder.disk_hits, builder.memory_hits) == (0, 1, 1)
    assert not (tmp_path / "cache").exists()


def test_another_kernel_is_missing_and_the_remedy_told(kernels: Path) -> None:
    with pytest.raises(CompilerMissing, match=r"Install one.* among the 1 that came"):
        Builder().load(OTHER, None, False)


def test_fast_kernels_are_others(kernels: Path) -> None:
    with pytest.raises(CompilerMissing):
        Builder().load(ANSWER, None, True)


def test_a_compiler_that_is_asked_for_is_not_gone_around(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CompilerMissing, match="no-such-compiler"):
        Builder().load(ANSWER, None, False)


def test_a_compiler_that_is_there_builds(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """For the very processor, which may have more than a level."""
    monkeypatch.undo()
    builder = Builder()
    assert builder.load(ANSWER, str(tmp_path / "cache"), False).answer() == 42
    assert builder.builds == 1


def test_a_damaged_kernel_is_told(
    kernels: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (library,) = kernels.glob("*/*.so")
    library.write_bytes(library.read_bytes()[:100])
    with pytest.raises(CompilerMissing, match="cannot be loaded"):
        Builder().load(ANSWER, None, False)
    assert "cannot be loaded" in caplog.text


def test_a_lower_level_serves_where_the_best_has_none(
    kernels: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    lowest = prebuilt.levels()[-1]
    path = build(OTHER, lowest, kernels)
    monkeypatch.setattr(prebuilt, "FOLDER", kernels)
    assert prebuilt.path_of(OTHER, False) == path
    assert ctypes.CDLL(str(path)).answer() == 43


def test_names_depend_on_all_that_the_library_does() -> None:
    names = {
        prebuilt.key(source, fast, level)
        for source in (ANSWER, OTHER)
        for fast in (False, True)
        for levels in prebuilt.LEVELS.values()
        for level in levels
    }
    assert len(names) == 16


def test_no_kernel_is_built_for_the_processor_that_is_here() -> None:
    assert NATIVE in COMMON_FLAGS
    for machine, levels in prebuilt.LEVELS.items():
        for level in levels:
            flags = flags_of(ANSWER, False, level)
            assert NATIVE not in flags
            assert f"-march={level}" in flags
            assert (WIDE in flags) == (machine == "x86_64")


def test_doctor_counts_them(kernels: Path) -> None:
    found = checks.compiler()
    assert found.state == "warn"
    assert "1 kernels of common steps" in found.text
    assert prebuilt.levels()[0] in found.text


def test_without_any_it_fails_as_ever(
    kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prebuilt, "FOLDER", kernels / "none")
    assert checks.compiler().state == "fail"
    with pytest.raises(CompilerMissing) as error:
        Builder().load(ANSWER, None, False)
    assert "among" not in str(error.value)
