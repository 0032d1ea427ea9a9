"""The cache of built kernels: shared, damaged, read-only, full, several processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuseopt.codegen import Source
from fuseopt.errors import BuildError
from fuseopt.runtime import build
from fuseopt.runtime.build import Builder

TEXT = 'extern "C" int answer() { return %d; }\n'
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from fuseopt.codegen import Source
from fuseopt.runtime.build import Builder
b = Builder()
lib = b.load(Source("cpp", {text!r}, "answer", ()), {folder!r}, False)
print(lib.answer(), b.builds, b.disk_hits)
"""


def source(number: int) -> Source:
    return Source("cpp", TEXT % number, "answer", ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def test_a_second_process_builds_nothing(folder: Path) -> None:
    first = Builder()
    assert first.load(source(7), str(folder), False).answer() == 7
    assert first.load(source(7), str(folder), False).answer() == 7
    assert (first.builds, first.disk_hits, first.memory_hits) == (1, 0, 1)
    second = Builder()
    assert second.load(source(7), str(folder), False).answer() == 7
    assert (second.builds, second.disk_hits) == (0, 1)


def test_flags_and_text_are_part_of_the_key(folder: Path) -> None:
    b = Builder()
    b.load(source(1), str(folder), False)
    b.load(source(1), str(folder), True)
    b.load(source(2), str(folder), False)
    assert b.builds == 3


@pytest.mark.parametrize("damage", [b"", b"not a library", None])
def test_a_damaged_library_is_built_again(
    folder: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    Builder().load(source(3), str(folder), False)
    (library,) = folder.glob("*/*.so")
    if damage is None:
        content = bytearray(library.read_bytes())
        content[len(content) // 2] ^= 0xFF
        damage = bytes(content)
    library.unlink()  # a mapped file must not be changed in place
    library.write_bytes(damage)
    again = Builder()
    assert again.load(source(3), str(folder), False).answer() == 3
    assert again.builds == 1
    assert "damaged" in caplog.text


def test_a_missing_checksum_is_built_again(folder: Path) -> None:
    Builder().load(source(4), str(folder), False)
    for check in folder.glob("*/*.sha256"):
        check.unlink()
    again = Builder()
    assert again.load(source(4), str(folder), False).answer() == 4
    assert again.builds == 1


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("a file where the folder should be")
    b = Builder()
    assert b.load(source(5), str(blocked / "kernels"), False).answer() == 5
    assert "cannot be used" in caplog.text


def test_a_read_only_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Permissions do not stop root, so the refusal is made at the call."""
    real = Path.mkdir

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        if folder in self.parents:
            raise PermissionError(30, "Read-only file system", str(self))
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", refuse)
    b = Builder()
    assert b.load(source(6), str(folder), False).answer() == 6
    assert "Read-only" in caplog.text


def test_a_full_disk(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = os.replace

    def refuse(old: Path, new: Path) -> None:
        if folder in Path(new).parents:
            raise OSError(28, "No space left on device")
        real(old, new)

    monkeypatch.setattr(build.os, "replace", refuse)
    b = Builder()
    assert b.load(source(8), str(folder), False).answer() == 8
    assert "No space left" in caplog.text


def test_two_processes_build_a_kernel_once(folder: Path) -> None:
    root = str(Path(__file__).parent.parent)
    program = PROGRAM.format(root=root, text=TEXT % 9, folder=str(folder))
    running = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    answers = [p.communicate(timeout=120)[0].split() for p in running]
    assert [a[0] for a in answers] == ["9"] * 3
    assert sum(int(a[1]) for a in answers) == 1, "one of them builds"
    assert sum(int(a[2]) for a in answers) == 2


def test_source_that_does_not_compile_is_kept(folder: Path) -> None:
    with pytest.raises(BuildError, match="refused generated source, kept as"):
        Builder().load(Source("cpp", "int f( {", "f", ()), str(folder), False)


def test_nothing_half_written_stays(folder: Path) -> None:
    with pytest.raises(BuildError):
        Builder().load(Source("cpp", "int f( {", "f", ()), str(folder), False)
    Builder().load(source(10), str(folder), False)
    names = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert names <= {".so", ".sha256", ".cpp", ".lock"}
    assert not list(folder.rglob(".build-*"))
