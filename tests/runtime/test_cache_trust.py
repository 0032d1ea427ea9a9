"""What counts in a kernel cache: only what nobody but the user, or root, may write."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import py_compile
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fuseopt.codegen import Source
from fuseopt.runtime import folders
from fuseopt.runtime.cpp import build
from fuseopt.runtime.cpp.build import Builder
from tests.runtime.cache_cases import NOBODY, modes, plant, run, source, warnings_of

pytestmark = pytest.mark.skipif(os.name != "posix", reason="of POSIX's rules")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be other users")


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that all users can reach, and only its owner writes."""
    path = Path(tempfile.mkdtemp(prefix="cache-of-fuseopt-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def loaded(folder: Path, number: int) -> int:
    answer: int = Builder().load(source(number), str(folder), False).answer()
    return answer


def linked(path: Path) -> None:
    """Put a link to a file or folder in its place."""
    real = path.with_name(f"{path.name}-real")
    path.rename(real)
    path.symlink_to(real)


def others(path: Path) -> None:
    os.chown(path, NOBODY, NOBODY)


def mode(bits: int) -> Callable[[Path], None]:
    return lambda path: path.chmod(bits)


def test_a_planted_library_is_what_it_takes(tmp_path: Path) -> None:
    """The plant of the other tests is good: the user alone could have put it there."""
    plant(tmp_path / "kernels", 1, 666)
    assert loaded(tmp_path / "kernels", 1) == 666


FOLDERS = {
    "everybody writes": mode(0o777),
    "everybody writes, sticky": mode(0o1777),
    "a group writes": mode(0o770),
    "another user's": others,
    "a link": linked,
}
FILES = {
    "everybody writes": mode(0o646),
    "a group writes": mode(0o660),
    "another user's": others,
    "a link": linked,
}


@pytest.mark.parametrize("spoil", FOLDERS)
@pytest.mark.parametrize("inner", [False, True], ids=["cache", "folder in it"])
def test_a_folder_that_others_may_write(
    tmp_path: Path, inner: bool, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    if FOLDERS[spoil] is others and os.geteuid():
        pytest.skip("needs to be root")
    library = plant(tmp_path / "kernels", 1, 666)
    spoilt = library.parent if inner else tmp_path / "kernels"
    FOLDERS[spoil](spoilt)
    before = modes(tmp_path)
    b = Builder()
    assert b.load(source(1), str(tmp_path / "kernels"), False).answer() == 1
    assert b.load(source(2), str(tmp_path / "kernels"), False).answer() == 2
    warned = warnings_of(caplog.text)
    if not inner:
        assert len(warned) == 1
        assert modes(tmp_path) == before, "nothing is written there"
    # a source whose folder is another one may be kept as ever
    assert len(warned) == 1
    assert str(spoilt) in warned[0]


@pytest.mark.parametrize("spoil", FILES)
@pytest.mark.parametrize("ending", [".so", ".sha256"])
def test_a_file_that_others_may_write(
    tmp_path: Path, ending: str, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    if FILES[spoil] is others and os.geteuid():
        pytest.skip("needs to be root")
    library = plant(tmp_path / "kernels", 1, 666)
    FILES[spoil](library.with_suffix(ending))
    b = Builder()
    assert b.load(source(1), str(tmp_path / "kernels"), False).answer() == 1
    assert b.builds == 1
    # it was replaced, and counts from now on
    assert library.with_suffix(ending).lstat().st_uid == os.geteuid()
    caplog.clear()
    again = Builder()
    assert again.load(source(1), str(tmp_path / "kernels"), False).answer() == 1
    assert (again.builds, again.disk_hits) == (0, 1)
    assert not warnings_of(caplog.text)


@as_root
def test_what_is_roots_counts_for_everybody(public: Path) -> None:
    folder = public / "kernels"
    plant(folder, 1, 666)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    found, said = run(folder, 1, user=NOBODY)
    assert (found["answers"], found["disk_hits"]) == ([666], 1)
    assert not warnings_of(said)


@as_root
def test_what_is_a_third_users_counts_for_nobody(public: Path) -> None:
    folder = public / "kernels"
    plant(folder, 1, 666)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 12345, 12345)
        path.chmod(0o755 if path.is_dir() else 0o644)
    for user in (NOBODY, 0):
        found, said = run(folder, 1, user=user)
        assert (found["answers"], found["builds"]) == ([1], 1)
        assert "belongs to another user, of id 12345" in said
        assert len(warnings_of(said)) == 1


@as_root
def test_a_planted_folder_in_a_place_that_all_write(public: Path) -> None:
    """A cache below /tmp, of which another user made the folder first."""
    public.chmod(0o1777)
    folder = public / "kernels"
    plant(folder, 1, 666)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    found, said = run(folder, 1)
    assert found["answers"] == [1]
    assert len(warnings_of(said)) == 1
    # one that nobody made yet is made, and is the user's alone
    found, said = run(public / "mine" / "kernels", 1)
    assert found == {"answers": [1], "builds": 1, "disk_hits": 0}
    assert not warnings_of(said)
    assert (public / "mine").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("umask", [0, 0o002, 0o077, 0o777], ids=oct)
def test_what_is_made_is_the_users_alone(public: Path, umask: int) -> None:
    user = None
    if os.geteuid() == 0:
        # root needs no permission, and would not notice that one is missing
        os.chown(public, NOBODY, NOBODY)
        user = NOBODY
    folder = public / "a" / "b" / "kernels"
    found, said = run(folder, 1, user=user, umask=umask)
    assert found == {"answers": [1], "builds": 1, "disk_hits": 0}, said
    for path, bits in modes(public / "a").items():
        assert bits == (0o700 if Path(path).is_dir() else 0o600), path
    found, said = run(folder, 1, user=user, umask=umask)
    assert found == {"answers": [1], "builds": 0, "disk_hits": 1}, said


# ---------------------------------------------------------------- checked is loaded


@pytest.mark.parametrize("way", ["in place", "another file", "another folder"])
def test_what_was_hashed_is_what_is_loaded(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Someone changes the file when its checksum was found right."""
    folder = tmp_path / "kernels"
    Builder().load(source(1), str(folder), False)
    (library,) = folder.glob("*/*.so")
    planted = plant(tmp_path / "planted", 1, 666)
    real = ctypes.CDLL
    swaps = []

    def swapped(name: str) -> ctypes.CDLL:
        swaps.append(name)
        if way == "in place":
            library.write_bytes(planted.read_bytes())
        elif way == "another file":
            os.replace(planted, library)
        else:
            folder.rename(tmp_path / "away")
            (tmp_path / "planted").rename(folder)
        return real(name)

    monkeypatch.setattr(build.ctypes, "CDLL", swapped)
    assert loaded(folder, 1) == 1
    assert len(swaps) == 1
    monkeypatch.undo()
    if way != "in place":  # the plant was there indeed, and would have been found
        planted_there = hashlib.sha256(library.read_bytes()).hexdigest()
        if way == "another folder":
            assert library.with_suffix(".sha256").read_text() == planted_there


def test_a_folder_put_in_the_place_of_one_that_was_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    plant(folder, 1, 1)
    with folders.Folder.open(str(folder)) as root:
        (part,) = root.names()
        folder.rename(tmp_path / "away")
        folder.mkdir()
        (folder / part).mkdir()
        (folder / part / "file").write_bytes(b"planted")
        with root.enter(part) as place:
            assert "file" not in place.names()


def test_it_works_without_memory_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(1, "not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    b = Builder()
    assert b.load(source(1), str(tmp_path / "kernels"), False).answer() == 1
    assert loaded(tmp_path / "kernels", 1) == 1
    assert b.builds == 1
    assert not list(tmp_path.glob("fuseopt-*")), "no copy is left"


def test_libraries_from_memory_are_told_apart(tmp_path: Path) -> None:
    """Descriptors have the same number again and again, libraries do not."""
    Builder().load(source(0x12345678), str(tmp_path), False)
    (library,) = tmp_path.glob("*/*.so")
    content, known = library.read_bytes(), (0x12345678).to_bytes(4, "little")
    assert content.count(known) == 1
    before = len(os.listdir("/proc/self/fd"))
    found = [
        build._loaded(content.replace(known, number.to_bytes(4, "little")))
        for number in range(1, 200)
    ]
    assert [library.answer() for library in found] == list(range(1, 200))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_warm_load_opens_five_files_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders, a checksum, a library, memory: no compiler, no lock, no write."""
    Builder().load(source(1), str(tmp_path), False)
    opened: list[object] = []
    for owner, name in (
        (os, "open"),
        (os, "memfd_create"),
        (os, "mkdir"),
        (os, "replace"),
        (build.subprocess, "run"),
    ):
        real = getattr(owner, name)

        def counted(
            *args: object, _real: object = real, _name: str = name, **kwargs: object
        ) -> object:
            opened.append((_name, args[0]))
            return _real(*args, **kwargs)  # type: ignore[operator]

        monkeypatch.setattr(owner, name, counted)
    assert loaded(tmp_path, 1) == 1
    monkeypatch.undo()
    assert [name for name, _ in opened] == ["open"] * 4 + ["memfd_create"], opened


# ---------------------------------------------------------------- modules of Triton

MODULE = "BLOCK, REST, OPTIONS = 1, 1, {}\ndef entry():\n    return %d\n"


@pytest.mark.parametrize("plant_it", ["compiled", "text", "folder"])
def test_modules_are_the_text_that_was_asked_for(
    plant_it: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither another text in the file nor Python's compiled file beside it is run."""
    pytest.importorskip("triton")
    import inspect

    from fuseopt.runtime.triton.build import TritonBuilder

    asked = Source("triton", MODULE % 1, "entry", ())
    module = TritonBuilder().load(asked, str(tmp_path), interpret=True)
    assert module.path.stat().st_mode & 0o777 == 0o600
    assert module.path.parent.stat().st_mode & 0o777 == 0o700
    if plant_it == "compiled":
        info = module.path.stat()
        module.path.write_text(MODULE % 6)
        os.utime(module.path, ns=(info.st_atime_ns, info.st_mtime_ns))
        py_compile.compile(str(module.path))
        module.path.write_text(asked.text)
        os.utime(module.path, ns=(info.st_atime_ns, info.st_mtime_ns))
    elif plant_it == "text":
        module.path.write_text(MODULE % 6)
    else:
        tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "fuseopt"):
        again = TritonBuilder().load(asked, str(tmp_path), interpret=True)
    assert again.entry() == 1
    assert "return 1" in inspect.getsource(again.entry)
    if plant_it == "folder":
        assert len(warnings_of(caplog.text)) == 1
        assert tmp_path not in again.path.parents


# ---------------------------------------------------------------- private folders


def test_a_private_folder_ends_with_its_process_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private = folders.Private()
    path = private.path
    assert Path(path).stat().st_mode & 0o777 == 0o700
    # another one of this process is left alone
    other = folders.Private()
    assert other.path != path
    assert Path(path).is_dir()
    # a child that ends as any process does takes nothing with it
    child = os.fork()
    if child == 0:
        own = private.path
        os._exit(0 if own != path and Path(path).is_dir() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert Path(path).is_dir()
    # what the child left is removed by the next; what lives, and what is no folder of
    # fuseopt's, is not
    for name in ("fuseopt-thesis", "fuseopt-young", "fuseopt-old", "fuseopt-older"):
        (tmp_path / name).mkdir()
    (tmp_path / "fuseopt-thesis" / "chapter").write_text("one")
    (tmp_path / "fuseopt-older" / ".new").write_text("")
    for name in ("fuseopt-thesis", "fuseopt-old", "fuseopt-older"):
        os.utime(tmp_path / name, (1, 1))
    assert len(list(tmp_path.iterdir())) == 7
    third = folders.Private()
    kept = {path, other.path, third.path}
    kept |= {str(tmp_path / name) for name in ("fuseopt-thesis", "fuseopt-young")}
    assert {str(p) for p in tmp_path.iterdir()} == kept
    del private
    assert not Path(path).exists()
