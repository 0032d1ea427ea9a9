"""Source -> a loaded shared library, through a content-addressed cache on disk.

A kernel's key is the hash of its text, the compiler, its flags and the processor's
features, so that a folder shared by several machines never gives a library that the
processor at hand cannot run. What is read from a folder is executed: `folders` says
which count, and the bytes whose checksum was right are those that are loaded. Writes
are atomic and under a lock per key; a damaged entry is built again; a folder that
cannot be used is replaced by a private temporary one.
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
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...codegen import Source
from ...errors import BuildError, CannotBuild, CompilerMissing
from ..folders import Folder, Private, Untrusted, chosen, sweep_private
from .toolchain import LINES, TRIAL, Compiler, find_compiler

log = logging.getLogger("fuseopt")

#: So long a process waits for another one that builds, once.
LOCK_SECONDS = 120.0
#: Folders of builds begin so; then comes the key.
WORK = ".build-"
#: What earlier versions left has no key in its name: nobody builds for a day.
LEFT_BEHIND = 86400.0
#: What compilers say when it is the place, not the source, that will not do.
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
    """A source to be built, and what builds it."""

    source: Source
    compiler: Compiler
    fast: bool
    key: str

    def command(self, text: str, made: str) -> list[str]:
        compiler, source = self.compiler, self.source
        flags = compiler.flags(source, self.fast)
        libraries = compiler.libraries(source)
        return [*compiler.command, *flags, "-o", made, text, *libraries]


class Builder:
    """Builds C++ kernels and counts what it did.

    `builds`: compiler runs. `disk_hits`: libraries found on disk. `loaded`: kernels by
    key, so that a process loads each once.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
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
        """The library of a C++ source. Raises CannotBuild or BuildError.

        `built` gets its key if a compiler had to run.
        """
        compiler = find_compiler()
        key = compiler.key(source, fast)
        if key in self._loaded:
            self.memory_hits += 1
            return self._loaded[key]
        library, made = self._obtain(
            chosen(cache_dir), Job(source, compiler, fast, key)
        )
        if built is not None and made:
            built.append(key)
        self._loaded[key] = library
        return library

    def _obtain(self, folder: str, job: Job) -> tuple[ctypes.CDLL, bool]:
        """The library; was it compiled now?"""
        try:
            found = self._find(folder, job.key)
            if found is not None:
                return found, False
            if folder not in self._shunned:
                return self._build(folder, job)
        except OSError as error:  # filelock's Timeout is one
            self._shun(folder, error)
        try:
            own = self._private.path
            found = self._find(own, job.key)
            return (found, False) if found is not None else self._build(own, job)
        except OSError as error:
            raise CannotBuild(
                f"no kernel can be built: neither {folder} nor a temporary folder can "
                f"be used ({error})."
            ) from error

    def _shun(self, folder: str, error: OSError) -> None:
        with self._lock:
            known = folder in self._shunned
            self._shunned.add(folder)
        if not known:
            log.warning(
                "kernel cache %s cannot be used (%s); building in a temporary folder",
                folder,
                error,
            )

    # ---------------------------------------------------------------- what is there

    def _find(self, folder: str, key: str) -> ctypes.CDLL | None:
        """A library that was built before; None if there is none that is whole."""
        try:
            with Folder.open(folder) as root, root.enter(key[:2]) as place:
                return self._hit(place, key)
        except FileNotFoundError:
            return None

    def _hit(self, place: Folder, key: str) -> ctypes.CDLL | None:
        found = _open(place, key)
        if found is not None:
            self.disk_hits += 1
        return found

    # ---------------------------------------------------------------- what is made

    def _build(self, folder: str, job: Job) -> tuple[ctypes.CDLL, bool]:
        """The library; was it compiled now, or by another process meanwhile?"""
        with contextlib.ExitStack() as stack:
            root = stack.enter_context(Folder.open(folder, make=True))
            place = stack.enter_context(root.enter(job.key[:2], make=True))
            with self._alone(folder, place, job.key):
                found = self._hit(place, job.key)
                if found is not None:
                    return found, False
                for name in place.names():
                    # nobody else builds this: what began so was killed
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
        """Hold a key's lock. Raises Timeout, of which one is enough for all keys."""
        import filelock  # only a process that builds waits for others

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
        """Compile a source, keep what came of it, and return that."""
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
        """Let the compiler make `kernel.so`, or raise what is the matter."""
        done = _call(job.command("kernel.cpp", "kernel.so"), work)
        if not done.returncode and work.holds("kernel.so"):
            return
        said = done.stderr.strip()
        if any(words in said for words in NO_PLACE):
            raise OSError(f"the compiler says: {_first_lines(said)}")
        # is it the source, or the compiler?
        with contextlib.suppress(OSError):  # which would hide what it says
            work.write("trial.cpp", TRIAL.encode())
            trial = _call(job.command("trial.cpp", "trial.so"), work)
            if trial.returncode or not work.holds("trial.so"):
                raise CompilerMissing(
                    f"{job.compiler.name} cannot make a library of any source (status "
                    f"{trial.returncode}).\n{_first_lines(trial.stderr)}".strip()
                )
        raise BuildError(
            f"{job.compiler.name} refused generated source, {_kept(job.source.text)}\n"
            f"{_first_lines(said)}"
        )


def _call(command: Sequence[str], work: Folder) -> subprocess.CompletedProcess[str]:
    """Run a compiler in a folder, where it keeps its temporary files as well."""
    # by its descriptor: whoever may rename what it lies in cannot put another there
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
            raise  # somebody removed the folder
        name = shlex.join(command[:1])
        raise CompilerMissing(f"{name} does not run: {error}") from error


def _first_lines(text: str) -> str:
    return "\n".join(text.splitlines()[:LINES])


def _kept(text: str) -> str:
    """Keep refused source under a name that nobody can foresee; says where."""
    try:
        handle, path = tempfile.mkstemp(prefix="fuseopt-", suffix=".cpp")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        return f"which cannot be kept ({error})"
    return f"kept as {path}"


def parts(root: Folder) -> list[str]:
    """The folders of a cache in which kernels lie, by name."""
    return [name for name in root.names() if len(name) == 2]


def sweep(root: Folder) -> None:
    """Remove what killed builds left in a cache; never what somebody builds in.

    Whoever builds a key holds its lock, which ends with the process.
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
    """Load a library from its bytes: a file may be another one a moment later."""
    try:
        handle = os.memfd_create("fuseopt")
    except (AttributeError, OSError):
        return _loaded_from_copy(content)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(content)
        # the loader takes libraries of one path for one library, and descriptors have
        # their numbers again and again: so the path says the same in another way
        # each time
        other = "".join("./" if x == "1" else "/" for x in f"{secrets.randbits(64):b}")
        return ctypes.CDLL(f"/proc/self/fd/{other}{handle}")
    except OSError:
        return _loaded_from_copy(content)
    finally:
        os.close(handle)


def _loaded_from_copy(content: bytes) -> ctypes.CDLL:
    """The same where nothing can be loaded from memory."""
    with tempfile.TemporaryDirectory(prefix="fuseopt-") as folder:
        path = os.path.join(folder, f"{secrets.token_hex(8)}.so")
        with open(path, "xb") as file:
            file.write(content)
        return ctypes.CDLL(path)
