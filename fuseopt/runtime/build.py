"""Source -> a loaded shared library, through a content-addressed cache on disk.

A kernel's key is the hash of its text, the compiler, its flags and the processor's
features, so that a folder shared by several machines never gives a library that the
processor at hand cannot run. Writes are atomic and under a lock per key; a damaged
entry is built again; a folder that cannot be written is replaced by a private temporary
one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

from ..codegen import Source
from ..errors import BuildError, CompilerMissing

log = logging.getLogger("fuseopt")

COMMON_FLAGS = (
    "-std=c++17",
    # loops vectorized as with -O3, the rest compiled a third faster
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-march=native",
    "-fPIC",
    "-shared",
    "-fopenmp",
    # <math.h> as C has it: libstdc++'s brings templates, a third of all that is read
    "-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS",
    "-fno-math-errno",
    "-fwrapv",  # integers overflow as they do in eager
    "-fno-trapping-math",
    "-w",
    # memory is the limit, and wide registers keep more of it under way
    *(("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()),
)
EXACT_FLAGS = ("-ffp-contract=off",)
#: For what neither throws nor catches, which is all but the helper of a call.
PLAIN_FLAGS = ("-fno-exceptions",)
#: What GCC links then; unasked it adds the library of C++, which no kernel calls and
#: which takes longer to read than all others.
GCC_LIBRARIES = ("-nodefaultlibs", "-lgomp", "-lm", "-lc", "-lgcc")
FAST_FLAGS = ("-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its path, and all that can change what it makes."""

    path: str
    identity: str

    @property
    def libraries(self) -> tuple[str, ...]:
        """What is linked to a kernel; the arguments after the source."""
        name = self.identity.split(" ", 1)[0]
        is_gcc = name.endswith("g++") and "clang" not in self.identity
        return GCC_LIBRARIES if is_gcc else ()


@functools.cache
def _processor() -> str:
    """The features of this machine's processor, as one string."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


@functools.cache
def _identify(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissing(f"{path} does not run: {error}") from error
    return done.stdout.split("\n", 1)[0]


def find_compiler() -> Compiler:
    """The C++ compiler: $CXX, g++, clang++ or c++. Raises CompilerMissing."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        path = shutil.which(name) if name else None
        if path:
            return Compiler(path, _identify(path))
    raise CompilerMissing(
        "no C++ compiler was found. Install one (Debian, Ubuntu: apt install g++; "
        "Fedora: dnf install gcc-c++; macOS: xcode-select --install) or set CXX."
    )


def default_cache_dir() -> Path:
    """The user's cache folder for built kernels."""
    import platformdirs  # needed by few processes: options may name a folder

    return Path(platformdirs.user_cache_dir("fuseopt"))


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
        self._scratch: Path | None = None

    def load(
        self,
        source: Source,
        cache_dir: str | None,
        fast: bool,
        built: list[str] | None = None,
    ) -> ctypes.CDLL:
        """The library of a C++ source. Raises CompilerMissing or BuildError.

        `built` gets its key if a compiler had to run.
        """
        compiler = find_compiler()
        flags = (*COMMON_FLAGS, *(FAST_FLAGS if fast else EXACT_FLAGS))
        flags += () if source.throws else PLAIN_FLAGS
        libraries = () if source.throws else compiler.libraries
        asked = " ".join((*flags, *libraries))
        parts = (source.text, compiler.identity, asked, _processor())
        key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        if key in self._loaded:
            self.memory_hits += 1
            return self._loaded[key]
        folder = Path(cache_dir) if cache_dir else default_cache_dir()
        try:
            library, made = self._from_disk(
                folder, key, source, compiler, flags, libraries
            )
        except OSError as error:  # filelock's Timeout is one
            log.warning(
                "kernel cache %s cannot be used (%s); building in a temporary folder",
                folder,
                error,
            )
            library, made = self._from_disk(
                self._temporary(), key, source, compiler, flags, libraries
            )
        if built is not None and made:
            built.append(key)
        self._loaded[key] = library
        return library

    def _temporary(self) -> Path:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="fuseopt-"))
            weakref.finalize(self, shutil.rmtree, self._scratch, ignore_errors=True)
        return self._scratch

    def _from_disk(
        self,
        folder: Path,
        key: str,
        source: Source,
        compiler: Compiler,
        flags: tuple[str, ...],
        libraries: tuple[str, ...],
    ) -> tuple[ctypes.CDLL, bool]:
        """The library; was it compiled now?"""
        place = folder / key[:2]
        library, check = place / f"{key}.so", place / f"{key}.sha256"
        found = _open(library, check)
        if found is not None:
            self.disk_hits += 1
            return found, False
        import filelock  # only a process that builds waits for others

        place.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(str(place / f"{key}.lock"), timeout=120):
            found = _open(library, check)  # another process may have built it
            if found is not None:
                self.disk_hits += 1
                return found, False
            self._compile(place, key, source, compiler, flags, libraries)
        found = _open(library, check)
        if found is None:
            raise OSError(f"{library} was written but cannot be read back")
        return found, True

    def _compile(
        self,
        place: Path,
        key: str,
        source: Source,
        compiler: Compiler,
        flags: tuple[str, ...],
        libraries: tuple[str, ...],
    ) -> None:
        with tempfile.TemporaryDirectory(dir=place, prefix=".build-") as work:
            text = Path(work) / "kernel.cpp"
            made = Path(work) / "kernel.so"
            text.write_text(source.text)
            with self._lock:
                self.builds += 1
            done = subprocess.run(
                [
                    *(compiler.path, *flags, "-o", str(made), str(text)),
                    *libraries,
                ],
                capture_output=True,
                text=True,
            )
            if done.returncode:
                if "No space left" in done.stderr:
                    raise OSError("no space left for the compiler")
                kept = Path(tempfile.gettempdir()) / f"fuseopt-{key[:8]}.cpp"
                kept.write_text(source.text)
                first = "\n".join(done.stderr.splitlines()[:12])
                raise BuildError(
                    f"{compiler.path} refused generated source, kept as {kept}\n{first}"
                )
            check = Path(work) / "kernel.sha256"
            check.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
            os.replace(text, place / f"{key}.cpp")
            os.replace(made, place / f"{key}.so")
            os.replace(check, place / f"{key}.sha256")


def _open(library: Path, check: Path) -> ctypes.CDLL | None:
    """Load a cached library if it is whole; None if it is missing or damaged."""
    try:
        expected = check.read_text().strip()
        content = library.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest() != expected:
        log.warning("cached kernel %s is damaged; building it again", library)
        return None
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        log.warning("cached kernel %s does not load (%s)", library, error)
        return None
