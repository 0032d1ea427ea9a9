"""The cache of built kernels: shared, damaged, read-only, full, several processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
import pytest

from fuseopt.codegen import Source
from fuseopt.errors import BuildError, CannotBuild
from fuseopt.runtime.cpp import build
from fuseopt.runtime.cpp.build import Builder
from fuseopt.runtime.folders import Folder, sweep_private
from tests import ROOT
from tests.runtime.cache_cases import NOBODY, TEXT, run, source, warnings_of

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")
PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from fuseopt.codegen import Source
from fuseopt.runtime.cpp.build import Builder
b = Builder()
print("begins", flush=True)
for number in {numbers!r}:
    lib = b.load(Source("cpp", {text!r} % number, "answer", ()), {folder!r}, False)
    print(lib.answer(), b.builds, b.disk_hits)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kernels"


def process(folder: Path, *numbers: int, **env: str) -> subprocess.Popen[str]:
    """A Python that loads sources by their numbers, in a session of its own."""
    program = PROGRAM.format(
        root=str(ROOT), numbers=numbers, text=TEXT, folder=str(folder)
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
        start_new_session=True,
    )


def answers(running: subprocess.Popen[str]) -> list[list[int]]:
    """What a process printed: an answer, its builds and its disk hits so far."""
    lines = running.communicate(timeout=120)[0].splitlines()[1:]
    return [[int(x) for x in line.split()] for line in lines]


def unfinished(folder: Path) -> list[Path]:
    return list(folder.rglob(".build-*"))


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


@pytest.mark.slow
def test_two_processes_build_a_kernel_once(folder: Path) -> None:
    found = [answers(p)[0] for p in [process(folder, 9) for _ in range(3)]]
    assert [a[0] for a in found] == [9] * 3
    assert sum(a[1] for a in found) == 1, "one of them builds"
    assert sum(a[2] for a in found) == 2


# ---------------------------------------------------------------- where it lies


def test_a_folder_by_its_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert Builder().load(source(1), "~/kernels", False).answer() == 1
    assert [p.name for p in tmp_path.iterdir()] == ["kernels"]
    b = Builder()
    b.load(source(1), str(tmp_path / "kernels"), False)
    assert b.disk_hits == 1


@pytest.mark.parametrize("name", ["-x", "--version", "a b", "-o/$HOME;'"])
def test_a_folder_whose_name_means_something_elsewhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    b = Builder()
    assert b.load(source(1), name, False).answer() == 1
    assert len(list((tmp_path / name).glob("*/*.so"))) == 1
    # it is the same one wherever the process goes
    monkeypatch.chdir("/")
    again = Builder()
    again.load(source(1), str(tmp_path / name), False)
    assert again.disk_hits == 1


# ---------------------------------------------------------------- where it cannot


def test_a_file_where_the_folder_should_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    b = Builder()
    for number in (5, 6):
        loaded = b.load(source(number), str(blocked / "kernels"), False)
        assert loaded.answer() == number
    assert len(warnings_of(caplog.text)) == 1


@as_root
def test_a_read_only_folder() -> None:
    """As another user, whom permissions do stop. What lies there is used."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "kernels"
        Builder().load(source(1), str(folder), False)
        for path in (Path(name), folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        found, said = run(folder, 1, user=NOBODY)
        assert found == {"answers": [1], "builds": 0, "disk_hits": 1}
        assert not said
        found, said = run(folder, 1, 2, 3, user=NOBODY)
        assert found == {"answers": [1, 2, 3], "builds": 2, "disk_hits": 1}
        assert len(warnings_of(said)) == 1
        assert "Permission denied" in said


@contextlib.contextmanager
def small_disk(path: Path, kilobytes: int) -> Iterator[None]:
    path.mkdir()
    options = f"size={kilobytes}k,mode=0700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@as_root
@pytest.mark.parametrize("kilobytes", [0, 4, 8, 16, 24])
def test_a_full_disk(
    tmp_path: Path, kilobytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Full before the folder is made, the source, temporary files, the library."""
    with small_disk(tmp_path / "disk", 48):
        filler = tmp_path / "disk" / "filler"
        with contextlib.suppress(OSError), filler.open("wb", 0) as file:
            for _ in range(48 - kilobytes):
                file.write(bytes(1024))
        b = Builder()
        for number in (8, 9):
            folder = str(tmp_path / "disk" / "kernels")
            assert b.load(source(number), folder, False).answer() == number
        assert len(warnings_of(caplog.text)) == 1
        assert not unfinished(tmp_path / "disk")


@pytest.mark.parametrize("limit", [0, 16, 2000])
def test_nowhere_to_write(tmp_path: Path, limit: int) -> None:
    """No file may grow, in the cache and elsewhere: an error that says so."""
    found, said = run(tmp_path / "kernels", 1, limit=limit)
    assert re.match("CannotBuild: no kernel can be built: neither ", found["error"])
    assert str(tmp_path / "kernels") in found["error"]
    assert len(warnings_of(said)) == 1


def test_no_temporary_folder_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotBuild, match=f"neither {tmp_path}/file/x nor"):
        Builder().load(source(1), str(tmp_path / "file" / "x"), False)


# ---------------------------------------------------------------- refused source


def refused(folder: Path) -> str:
    with pytest.raises(BuildError) as caught:
        Builder().load(Source("cpp", "int f( {", "f", ()), str(folder), False)
    return str(caught.value)


def test_refused_source_is_kept_where_nobody_could_foresee(folder: Path) -> None:
    kept = []
    for _ in range(2):
        found = re.search(r"refused generated source, kept as (\S+)\n", refused(folder))
        assert found
        kept.append(Path(found[1]))
    assert kept[0] != kept[1]
    for path in kept:
        assert path.read_text() == "int f( {"
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()


@pytest.mark.parametrize("why", ["no folder", "full", "full for a trial"])
def test_refused_source_that_cannot_be_kept(
    folder: Path, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the compiler says is said all the same."""
    if why == "full for a trial":
        write = Folder.write

        def refuse(self: Folder, name: str, content: bytes) -> None:
            if name == "trial.cpp":
                raise OSError(28, "No space left on device")
            write(self, name, content)

        monkeypatch.setattr(Folder, "write", refuse)
    if why == "full":
        full = os.open("/dev/full", os.O_WRONLY)
        monkeypatch.setattr(tempfile, "mkstemp", lambda **_: (full, "/dev/full"))
    else:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nothing"))
    told = refused(folder)
    assert "refused generated source, which cannot be kept" in told
    assert "kernel.cpp:1:" in told
    assert "error: " in told


def test_nothing_half_written_stays(folder: Path) -> None:
    Path(re.findall(r"kept as (\S+)\n", refused(folder))[0]).unlink()
    Builder().load(source(10), str(folder), False)
    names = {p.suffix for p in folder.rglob("*") if p.is_file()}
    assert names <= {".so", ".sha256", ".cpp", ".lock"}
    assert not unfinished(folder)


# ---------------------------------------------------------------- locks, kills


def test_a_stuck_lock_costs_its_time_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "LOCK_SECONDS", 0.3)
    # every lock there is: they are made by builds that fail
    numbers = (1, 2, 3)
    b = Builder()
    for number in numbers:
        b.load(source(number), str(folder), False)
    held = [os.open(lock, os.O_RDWR) for lock in folder.glob("*/*.lock")]
    assert len(held) == len(numbers)
    for handle in held:
        fcntl.flock(handle, fcntl.LOCK_EX)
    for path in [*folder.glob("*/*.so")][:2]:
        path.unlink()
    waits = []
    acquire = filelock.FileLock.acquire

    def counted(self: filelock.FileLock, *args: object, **kwargs: object) -> object:
        waits.append(Path(self.lock_file).parent.parent == folder)
        return acquire(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(filelock.FileLock, "acquire", counted)
    b = Builder()
    for number in numbers:
        assert b.load(source(number), str(folder), False).answer() == number
    for handle in held:
        os.close(handle)
    assert sum(waits) == 1, "one lock was waited for, once"
    assert (b.builds, b.disk_hits) == (2, 1), "what lies there is used"
    assert len(warnings_of(caplog.text)) == 1


@pytest.mark.slow
def test_a_live_build_is_not_swept(folder: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text(
        "#!/bin/sh\n"
        f'case "$*" in *kernel.so*) touch {tmp_path}/compiles; '
        f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done;; esac\n"
        'exec g++ "$@"\n'
    )
    slow.chmod(0o755)
    running = process(folder, 1, CXX=str(slow))
    while not (tmp_path / "compiles").exists():
        assert running.poll() is None
        time.sleep(0.02)
    (work,) = unfinished(folder)
    b = Builder()
    for number in (2, 3):
        b.load(source(number), str(folder), False)
    assert unfinished(folder) == [work]
    assert (work / "kernel.cpp").exists()
    (tmp_path / "go").touch()
    assert answers(running) == [[1, 1, 0]]
    assert not unfinished(folder)


def test_what_was_left_long_ago_is_swept(folder: Path) -> None:
    """Earlier versions named their folders otherwise; nobody locks them."""
    Builder().load(source(1), str(folder), False)
    (part,) = folder.iterdir()
    for name in ("old", "new"):
        (part / f".build-{name}").mkdir()
        (part / f".build-{name}" / "kernel.cpp").write_text("")
    os.utime(part / ".build-old", (1, 1))
    (part / ".build-file").write_text("")
    os.utime(part / ".build-file", (1, 1))
    Builder().load(source(2), str(folder), False)
    assert [p.name for p in unfinished(folder)] == [".build-new"]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [12, 60], ids=str)
def test_what_killed_builds_leave_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: int
) -> None:
    """Processes of which every one is killed, compilers and all; then one is not."""
    moments = random.Random(7)
    folder, temporary = tmp_path / "kernels", tmp_path / "tmp"
    temporary.mkdir()
    (tmp_path / "file").write_text("")
    most = 0
    for number in range(kills):
        # some of them cannot use the cache, and have folders of their own
        where = folder if number % 3 else tmp_path / "file" / "kernels"
        env = {"TMPDIR": str(temporary)}
        running = [process(where, number, 1000 + number, **env) for _ in range(2)]
        for one in running:
            assert one.stdout is not None
            one.stdout.readline()
        time.sleep(moments.uniform(0, 0.4))
        for one in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.communicate()
        most = max(most, len(unfinished(tmp_path)))
    assert most, "no kill came while a compiler ran"
    last = process(folder, 5000, 5001, TMPDIR=str(temporary))
    assert answers(last) == [[5000, 1, 0], [5001, 2, 0]]
    assert not unfinished(tmp_path)
    # A process that is killed before it could mark its folder as its own leaves one
    # that might be a living process's: it is swept when it is an hour old.
    for left in temporary.iterdir():
        assert {p.name for p in left.iterdir()} <= {".new"}
        os.utime(left, (1, 1))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    sweep_private()
    assert not list(temporary.iterdir())
    # and every library that lies there is whole
    b = Builder()
    for number in range(kills):
        assert b.load(source(number), str(folder), False).answer() == number
