"""The C++ compiler: which one, what it is asked for, and all that tells it apart.

`$CXX` is a command as in a shell: `g++ -O0`, `ccache g++`, a path in quotes. Where it
is set, no other compiler is ever taken.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...codegen import Source
from ...errors import CompilerMissing

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
#: Before all others: it takes back what $CXX may allow.
STRICT_FLAGS = ("-fno-fast-math",)
#: For what neither throws nor catches, which is all but the helper of a call.
PLAIN_FLAGS = ("-fno-exceptions",)
#: What GCC links then; unasked it adds the library of C++, which no kernel calls and
#: which takes longer to read than all others.
GCC_LIBRARIES = ("-nodefaultlibs", "-lgomp", "-lm", "-lc", "-lgcc")
FAST_FLAGS = ("-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros")
#: What a compiler must at least be able to compile, with the flags of a kernel.
TRIAL = "#include <math.h>\n#include <stdint.h>\n" + 'extern "C" void trial() {}\n'
#: Files up to this size may be scripts, which are told apart by what is in them.
SCRIPT = 1 << 16
#: Of what a compiler says, so much is shown.
LINES = 12
_asking = threading.Lock()


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: how to call it, and all that can change what it makes."""

    command: tuple[str, ...]
    identity: str
    is_gcc: bool

    @property
    def path(self) -> str:
        """The program that is called."""
        return self.command[0]

    @property
    def name(self) -> str:
        """What the user may call it by."""
        return shlex.join(self.command)

    def flags(self, source: Source, fast: bool) -> tuple[str, ...]:
        """What it is asked for; the arguments before the source."""
        exact = (*STRICT_FLAGS, *COMMON_FLAGS, *EXACT_FLAGS)
        flags = (*COMMON_FLAGS, *FAST_FLAGS) if fast else exact
        return flags if source.throws else (*flags, *PLAIN_FLAGS)

    def libraries(self, source: Source) -> tuple[str, ...]:
        """What is linked to a kernel; the arguments after the source."""
        return GCC_LIBRARIES if self.is_gcc and not source.throws else ()

    def key(self, source: Source, fast: bool) -> str:
        """The name under which a library is kept: a hash of all that it depends on."""
        asked = " ".join((*self.flags(source, fast), *self.libraries(source)))
        parts = (source.text, self.identity, asked, _processor())
        told = "\0".join(parts).encode(errors="surrogateescape")
        return hashlib.sha256(told).hexdigest()[:32]


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


def find_compiler() -> Compiler:
    """The C++ compiler: $CXX, or else g++, clang++ or c++. Raises CompilerMissing."""
    asked = os.environ.get("CXX", "").strip()
    if asked:
        command = _command(asked)
        return _once(command, _stamps(command))
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path:
            path = os.path.abspath(path)
            return _once((path,), _stamps((path,)))
    raise CompilerMissing(
        "no C++ compiler was found. Install one (Debian, Ubuntu: apt install g++; "
        "Fedora: dnf install gcc-c++; macOS: xcode-select --install) or set CXX."
    )


def _command(asked: str) -> tuple[str, ...]:
    """The words of $CXX, programs among them as paths. Raises CompilerMissing."""
    whole = shutil.which(asked)  # a path with spaces, of which nobody quoted any
    if whole:
        return (os.path.abspath(whole),)
    try:
        words = shlex.split(asked)
    except ValueError as error:
        raise CompilerMissing(
            f"CXX={asked!r} cannot be read as a command ({error})."
        ) from error
    path = shutil.which(words[0]) if words else None
    if not path:
        raise CompilerMissing(
            f"CXX={asked!r} names no program that can be run. Correct it, or unset it "
            "for the first of g++, clang++, c++ that is found."
        )
    # the working directory of a compilation is another one
    rest = (os.path.abspath(w) if _is_program(w) else w for w in words[1:])
    return (os.path.abspath(path), *rest)


def _is_program(word: str) -> bool:
    return os.sep in word and os.access(word, os.X_OK) and os.path.isfile(word)


def _stamps(command: Sequence[str]) -> tuple[tuple[object, ...], ...]:
    """What tells the programs of a command apart from others of their names.

    A script may run the same compiler as another one, with other flags: so what it
    holds counts, for whatever its time says.
    """
    found: list[tuple[object, ...]] = []
    for number, word in enumerate(command):
        path = word if os.sep in word else shutil.which(word)
        if path is None or word.startswith("-"):
            continue
        try:
            real = os.path.realpath(path)
            info = os.stat(real)
            if not os.path.isfile(real):
                continue
            content = Path(real).read_bytes() if info.st_size <= SCRIPT else b""
        except OSError:
            continue
        digest = hashlib.sha256(content).hexdigest()
        found.append((number, real, info.st_size, info.st_mtime_ns, digest))
    return tuple(found)


def _once(command: tuple[str, ...], stamps: tuple[tuple[object, ...], ...]) -> Compiler:
    with _asking:  # kernels are built by several threads
        return _identified(command, stamps)


@functools.lru_cache(maxsize=64)
def _identified(
    command: tuple[str, ...], stamps: tuple[tuple[object, ...], ...]
) -> Compiler:
    """A command with all that can change what it makes. Raises CompilerMissing.

    What a compiler would do, it says itself, if it is GCC or Clang: with the flags that
    a wrapper adds, be it because of the environment, and with those it has built in.
    """
    asked = ("-###", *COMMON_FLAGS, "-S", "-o", os.devnull, "-x", "c++", os.devnull)
    code, told = _ask((*command, *asked))
    if code or "version" not in told:
        code, told = _ask((*command, "--version"))
        if code or not told.strip():
            name = shlex.join(command)
            said = told.strip().split("\n", 1)[0]
            raise CompilerMissing(
                f"{name} is no C++ compiler that can be used: asked for its version, "
                f"it ends with status {code}. Set CXX to one that can.\n{said}".strip()
            )
        told = told.split("\n", 1)[0]
        is_gcc = told.split(" ", 1)[0].endswith("g++")
    else:
        is_gcc = "\ngcc version" in told
    identity = "\0".join((*command, *map(repr, stamps), told))
    return Compiler(command, identity, is_gcc and "clang" not in told)


def _ask(command: Sequence[str]) -> tuple[int, str]:
    """The status of a command, and what it says. Raises CompilerMissing."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=30,
            cwd="/",
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerMissing(f"{shlex.join(command[:1])} does not run: {error}") from (
            error
        )
    return done.returncode, done.stdout
