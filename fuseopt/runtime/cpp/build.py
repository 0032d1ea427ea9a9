"""Build C++ source to a loaded shared library, with a content-addressed cache on disk.

A kernel's key is the hash of its text, the compiler, its flags and the processor's
features. So a folder shared by several machines never gives a library that this
processor cannot run. Without a compiler, the kernels of the package are loaded
(`prebuilt`). Libraries are code: `folders` decides which files are trusted, and the
loader gets the very bytes whose checksum was verified. Writes are atomic and under a
lock per key. A damaged entry is rebuilt. A private temporary folder replaces one that
cannot be used.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import secrets
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...codegen import Source
from ...errors import BuildError, CannotBuild, CompilerMissing
from ...locks import new_lock
from ..folders import Folder, Private, Untrusted, chosen, sweep_private
from . import prebuilt
from .toolchain import LINES, TRIAL, Compiler, find_compiler

log = logging.getLogger("fuseopt")

#: Seconds for which a process waits, once, for another process that builds.
LOCK_SECONDS = 120.0
#: Prefix of the folders of builds; the key follows.
WORK = ".build-"
#: Seconds after which a folder of an earlier version, without a key, is removed.
LEFT_BEHIND = 86400.0
#: Messages of compilers where the disk, not the source, is the cause.
NO_PLACE = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "File size limit exceeded",
    "Read-only file system",
    "Input/output error",
    "[Bus error]",
)


@dataclass(frozen=True)
class Job:
    """Source to build, with its compiler."""

    source: Source
    compiler: Compiler
    fast: bool
    key: str

    def command(self, source_file: str, library_file: str) -> list[str]:
        compiler, source = self.compiler, self.source
        flags = compiler.flags(source, self.fast)
        libraries = compiler.libraries(source)
        return [*compiler.command, *flags, "-o", library_file, source_file, *libraries]


class Builder:
    """Builder of C++ kernels, with counts of what it did.

    `builds` counts compiler runs, `disk_hits` libraries found on disk. `loaded` has
    kernels by key, so that a process loads each once.
    """

    def __init__(self) -> None:
        self._lock = new_lock()
        self.builds = 0
        self.disk_hits = 0
        self.memory_hits = 0
        self._loaded: dict[str, ctypes.CDLL] = {}
        self._private = Private()
        #: folders in which nothing is built any more
        self._shunned: set[str] = set()
        self._swept: set[str] = set()

    def load(
        self,
        source: Source,
        cache_dir: str | None,
        fast: bool,
        built: list[str] | None = None,
    ) -> ctypes.CDLL:
        """Return the library of a C++ source. Raises CannotBuild or BuildError.

        `built` gets its key if a compiler had to run.
        """
        compiler = self.compiler_for(source, fast)
        if isinstance(compiler, Path):
            return self._of_package(compiler)
        key = compiler.key(source, fast)
        if key in self._loaded:
            self.memory_hits += 1
            return self._loaded[key]
        library, compiled = self._obtain(
            chosen(cache_dir), Job(source, compiler, fast, key)
        )
        if built is not None and compiled:
            built.append(key)
        self._loaded[key] = library
        return library

    def compiler_for(self, source: Source, fast: bool) -> Compiler | Path:
        """Return the compiler; without one, the path of a kernel of the package. Raises
        CompilerMissing where there is neither.
        """
        try:
            return find_compiler()
        except CompilerMissing as error:
            # a $CXX that cannot be run must be corrected, not ignored
            if os.environ.get("CXX", "").strip():
                raise
            path = prebuilt.path_of(source, fast)
            if path is not None:
                return path
            if not prebuilt.count():
                raise
            raise CompilerMissing(
                f"{error} The kernel of this step is not among the {prebuilt.count()} "
                "that came with the package."
            ) from error

    def _of_package(self, path: Path) -> ctypes.CDLL:
        """Load a kernel of the package."""
        key = str(path)
        if key in self._loaded:
            self.memory_hits += 1
            return self._loaded[key]
        library = prebuilt.load(path)
        if library is None:
            raise CompilerMissing(
                f"there is no C++ compiler, and {key}, which came with the package, "
                "cannot be loaded. Install a compiler, or libgomp1 (Debian, Ubuntu)."
            )
        self.disk_hits += 1
        self._loaded[key] = library
        return library

    def _obtain(self, folder: str, job: Job) -> tuple[ctypes.CDLL, bool]:
        """Return the library, and whether this call compiled it."""
        try:
            library = self._find(folder, job.key)
            if library is not None:
                return library, False
            if folder not in self._shunned:
                return self._build(folder, job)
        except OSError as error:  # filelock's Timeout is one
            self._shun(folder, error)
        try:
            private = self._private.path
            library = self._find(private, job.key)
            return (
                (library, False) if library is not None else self._build(private, job)
            )
        except OSError as error:
            raise CannotBuild(
                f"no kernel can be built: neither {folder} nor a temporary folder can "
                f"be used ({error})."
            ) from error

    def _shun(self, folder: str, error: OSError) -> None:
        with self._lock:
            was_shunned = folder in self._shunned
            self._shunned.add(folder)
        if not was_shunned:
            log.warning(
                "kernel cache %s cannot be used (%s); building in a temporary folder",
                folder,
                error,
            )

    # ---------------------------------------------------------------- the cache

    def _find(self, folder: str, key: str) -> ctypes.CDLL | None:
        """Return a cached library; None if it is missing or damaged."""
        try:
            with Folder.open(folder) as root, root.enter(key[:2]) as place:
                return self._hit(place, key)
        except FileNotFoundError:
            return None

    def _hit(self, place: Folder, key: str) -> ctypes.CDLL | None:
        library = _open(place, key)
        if library is not None:
            self.disk_hits += 1
        return library

    # ---------------------------------------------------------------- builds

    def _build(self, folder: str, job: Job) -> tuple[ctypes.CDLL, bool]:
        """Return the library, and whether this process compiled it."""
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(Folder.open(folder, make=True))
            place = stack.enter_context(root.enter(job.key[:2], make=True))
            with self._alone(folder, place, job.key):
                library = self._hit(place, job.key)
                if library is not None:
                    return library, False
                for name in place.names():
                    # this process has the lock, so a folder of this key is of a killed
                    # build
                    if name.startswith(f"{WORK}{job.key}"):
                        place.remove(name)
                content = self._compile(place, job)
            with self._lock:
                first = folder not in self._swept
                self._swept.add(folder)
            if first:
                sweep(root)
                sweep_private()
        try:
            return _loaded(content), True
        except OSError as error:
            raise CompilerMissing(
                f"{job.compiler.name} makes libraries that cannot be loaded ({error})."
            ) from error

    @contextlib.contextmanager
    def _alone(self, folder: str, place: Folder, key: str) -> Iterator[None]:
        """Hold a key's lock. Raises Timeout, once for all keys."""
        import filelock  # only a process that builds waits for another one

        lock = filelock.FileLock(os.path.join(place.path, f"{key}.lock"), mode=0o600)
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                lock.acquire(timeout=min(1.0, LOCK_SECONDS))
                break
            except filelock.Timeout:
                if time.monotonic() >= end or folder in self._shunned:
                    raise
        try:
            yield
        finally:
            lock.release()

    def _compile(self, place: Folder, job: Job) -> bytes:
        """Compile a source and cache the library; return its bytes."""
        name = f"{WORK}{job.key}-{secrets.token_hex(4)}"
        try:
            with place.enter(name, make=True) as work:
                work.write("kernel.cpp", job.source.text.encode())
                with self._lock:
                    self.builds += 1
                self._run(work, job)
                work.close_to_others("kernel.so")
                content = work.read("kernel.so")
                check = hashlib.sha256(content).hexdigest()
                work.write("kernel.sha256", check.encode())
                for ending in ("cpp", "so", "sha256"):
                    work.move(f"kernel.{ending}", place, f"{job.key}.{ending}")
                return content
        finally:
            place.remove(name)

    def _run(self, work: Folder, job: Job) -> None:
        """Compile `kernel.so`. Raises OSError, CompilerMissing or BuildError where the
        disk, the compiler or the source is the cause.
        """
        result = _call(job.command("kernel.cpp", "kernel.so"), work)
        if not result.returncode and work.holds("kernel.so"):
            return
        message = result.stderr.strip()
        if any(words in message for words in NO_PLACE):
            raise OSError(f"the compiler says: {_first_lines(message)}")
        # find out whether the source or the compiler is the cause
        with contextlib.suppress(OSError):  # a full disk would hide the cause
            work.write("trial.cpp", TRIAL.encode())
            trial = _call(job.command("trial.cpp", "trial.so"), work)
            if trial.returncode or not work.holds("trial.so"):
                raise CompilerMissing(
                    f"{job.compiler.name} cannot make a library of any source (status "
                    f"{trial.returncode}).\n{_first_lines(trial.stderr)}".strip()
                )
        raise BuildError(
            f"{job.compiler.name} refused generated source, {_kept(job.source.text)}\n"
            f"{_first_lines(message)}"
        )


def _call(command: Sequence[str], work: Folder) -> subprocess.CompletedProcess[str]:
    """Run a compiler in a folder, where it keeps its temporary files too."""
    # by its descriptor, since renaming a parent folder can replace a path
    by_descriptor = f"/proc/self/fd/{work.handle}"
    place = by_descriptor if os.path.isdir(by_descriptor) else work.path
    try:
        return subprocess.run(
            command,
            cwd=place,
            env={**os.environ, "LC_ALL": "C", "TMPDIR": "."},
            umask=0o077,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
        )
    except OSError as error:
        if error.filename == place:
            raise  # another process removed the folder
        name = shlex.join(command[:1])
        raise CompilerMissing(f"{name} does not run: {error}") from error


def _first_lines(text: str) -> str:
    return "\n".join(text.splitlines()[:LINES])


def _kept(text: str) -> str:
    """Write refused source to a file with an unpredictable name; return a text that
    names it, or gives the reason why there is none.
    """
    try:
        handle, path = tempfile.mkstemp(prefix="fuseopt-", suffix=".cpp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return f"which cannot be kept ({error})"
    return f"kept as {path}"


def parts(root: Folder) -> list[str]:
    """Return the folders of a cache in which kernels lie, by name."""
    return [name for name in root.names() if len(name) == 2]


def sweep(root: Folder) -> None:
    """Remove the folders of killed builds from a cache, never those of running ones.

    A running build holds the lock of its key, which ends with the process.
    """
    import filelock

    for part in parts(root):
        with contextlib.suppress(OSError), root.enter(part) as place:
            for name in place.names():
                if not name.startswith(WORK):
                    continue
                key, dash, _ = name.removeprefix(WORK).partition("-")
                if not dash:
                    if place.age(name, time.time()) > LEFT_BEHIND:
                        place.remove(name)
                    continue
                path = os.path.join(place.path, f"{key}.lock")
                lock = filelock.FileLock(path, timeout=0, mode=0o600)
                with contextlib.suppress(filelock.Timeout), lock:
                    place.remove(name)


def _open(place: Folder, key: str) -> ctypes.CDLL | None:
    """Load a cached library if it is whole; None if it is missing or damaged."""
    try:
        expected = place.read(f"{key}.sha256").strip()
        content = place.read(f"{key}.so")
    except Untrusted as error:
        log.warning("cached kernel is not used: %s; building it again", error)
        return None
    except OSError:
        return None
    name = os.path.join(place.path, f"{key}.so")
    if hashlib.sha256(content).hexdigest().encode() != expected:
        log.warning("cached kernel %s is damaged; building it again", name)
        return None
    try:
        return _loaded(content)
    except OSError as error:
        log.warning("cached kernel %s does not load (%s)", name, error)
        return None


def _loaded(content: bytes) -> ctypes.CDLL:
    """Load a library from its bytes, since a file may change a moment later."""
    try:
        handle = os.memfd_create("fuseopt")
    except (AttributeError, OSError):
        return _loaded_from_copy(content)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(content)
        # the loader takes libraries of one path for one library, and the system reuses
        # numbers of descriptors. So each load spells the path differently
        detour = "".join("./" if x == "1" else "/" for x in f"{secrets.randbits(64):b}")
        return ctypes.CDLL(f"/proc/self/fd/{detour}{handle}")
    except OSError:
        return _loaded_from_copy(content)
    finally:
        os.close(handle)


def _loaded_from_copy(content: bytes) -> ctypes.CDLL:
    """Load a library from a copy on disk, where the loader cannot read memory."""
    with tempfile.TemporaryDirectory(prefix="fuseopt-") as folder:
        path = os.path.join(folder, f"{secrets.token_hex(8)}.so")
        with open(path, "xb") as file:
            file.write(content)
        return ctypes.CDLL(path)
