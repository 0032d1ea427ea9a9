"""Find the C++ compiler, its flags, and the identity by which kernels are cached.

`$CXX` is a command as in a shell: `g++ -O0`, `ccache g++`, a path in quotes. Where it
is set, no other compiler is tried.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...codegen import Source
from ...errors import CompilerMissing
from ...locks import new_lock

#: Flag for the processor of this machine; kernels for other machines lack it.
NATIVE = "-march=native"
#: Flag of x86-64: memory is the limit, and wide registers have more loads under way.
WIDE = "-mprefer-vector-width=512"
COMMON_FLAGS = (
    "-std=c++17",
    # vectorizes loops as -O3 does, compiles the rest a third faster
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    NATIVE,
    "-fPIC",
    "-shared",
    "-fopenmp",
    # <math.h> of C alone: libstdc++'s includes templates, a third of the whole text
    "-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS",
    "-fno-math-errno",
    "-fwrapv",  # integers overflow as they do in eager
    "-fno-trapping-math",
    "-w",
    *((WIDE,) if platform.machine() == "x86_64" else ()),
)
EXACT_FLAGS = ("-ffp-contract=off",)
#: First flags: they undo what $CXX may allow.
STRICT_FLAGS = ("-fno-fast-math",)
#: Flags of source that neither throws nor catches: all but the library of the guards.
PLAIN_FLAGS = ("-fno-exceptions",)
#: Libraries that GCC links then. By default it adds the C++ library. No kernel calls
#: that, and it takes longer to read than all other ones.
GCC_LIBRARIES = ("-nodefaultlibs", "-lgomp", "-lm", "-lc", "-lgcc")
FAST_FLAGS = ("-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros")
#: Least source that a compiler must be able to compile with the flags of a kernel.
TRIAL = "#include <math.h>\n#include <stdint.h>\n" + 'extern "C" void trial() {}\n'
#: Largest size of a possible script; a script's contents are a part of the identity.
SCRIPT = 1 << 16
#: Lines of a compiler's output that messages show.
LINES = 12
#: Variables where GCC and Clang look for folders of headers, besides their flags.
HEADERS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")

_lock = new_lock()


@dataclass(frozen=True)
class Compiler:
    """C++ compiler: its command, and all that its output depends on (`identity`)."""

    command: tuple[str, ...]
    identity: str
    is_gcc: bool

    @property
    def path(self) -> str:
        """Return the program to run."""
        return self.command[0]

    @property
    def name(self) -> str:
        """Return the command as one string, for messages."""
        return shlex.join(self.command)

    def flags(self, source: Source, fast: bool) -> tuple[str, ...]:
        """Return the arguments before the source."""
        return flags_of(source, fast)

    def libraries(self, source: Source) -> tuple[str, ...]:
        """Return the libraries to link; the arguments after the source."""
        return GCC_LIBRARIES if self.is_gcc and not source.throws else ()

    def key(self, source: Source, fast: bool) -> str:
        """Return the name of a cached library: a hash of all that it depends on."""
        arguments = " ".join((*self.flags(source, fast), *self.libraries(source)))
        return name_of(source.text, self.identity, arguments, processor())


def flags_of(source: Source, fast: bool, march: str = "") -> tuple[str, ...]:
    """Return the flags of a kernel, for this processor or a level ("x86-64-v3")."""
    common = COMMON_FLAGS
    if march:
        wide = (WIDE,) if march.startswith("x86-64") else ()
        common = tuple([f"-march={march}" if x == NATIVE else x for x in common])
        common = (*(x for x in common if x != WIDE), *wide)
    exact = (*STRICT_FLAGS, *common, *EXACT_FLAGS)
    flags = (*common, *FAST_FLAGS) if fast else exact
    return flags if source.throws else (*flags, *PLAIN_FLAGS)


def name_of(text: str, identity: str, arguments: str, runs_on: str) -> str:
    """Return the name of a library: a hash of its text, builder and processor."""
    content = "\0".join((text, identity, arguments, runs_on))
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:32]


@functools.cache
def processor() -> str:
    """Return the features of this machine's processor, as one string."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return f"{platform.machine()} {platform.processor()}"


def find_compiler() -> Compiler:
    """Return the C++ compiler: $CXX, or else g++, clang++ or c++. Raises
    CompilerMissing.
    """
    wanted = os.environ.get("CXX", "").strip()
    if wanted:
        command = _command(wanted)
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


def _command(wanted: str) -> tuple[str, ...]:
    """Return the words of $CXX, programs among them as paths. Raises
    CompilerMissing.
    """
    whole = shutil.which(wanted)  # a path with spaces and without quotes
    if whole:
        return (os.path.abspath(whole),)
    try:
        words = shlex.split(wanted)
    except ValueError as error:
        raise CompilerMissing(
            f"CXX={wanted!r} cannot be read as a command ({error})."
        ) from error
    path = shutil.which(words[0]) if words else None
    if not path:
        raise CompilerMissing(
            f"CXX={wanted!r} names no program that can be run. Correct it, or unset it "
            "for the first of g++, clang++, c++ that is found."
        )
    # a compilation has another working directory
    arguments = (os.path.abspath(w) if _is_program(w) else w for w in words[1:])
    return (os.path.abspath(path), *arguments)


def _is_program(word: str) -> bool:
    return os.sep in word and os.access(word, os.X_OK) and os.path.isfile(word)


def _stamps(command: Sequence[str]) -> tuple[tuple[object, ...], ...]:
    """Return the identity of each program of a command: path, size, time, digest of a
    script. Add the folders of headers of the environment, which `-###` does not show.

    A wrapper script may change its flags while its size and time stay the same. So the
    identity hashes its contents.
    """
    stamps: list[tuple[object, ...]] = []
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
        stamps.append((number, real, info.st_size, info.st_mtime_ns, digest))
    stamps += [(x, os.environ[x]) for x in HEADERS if os.environ.get(x)]
    return tuple(stamps)


def _once(command: tuple[str, ...], stamps: tuple[tuple[object, ...], ...]) -> Compiler:
    with _lock:  # several threads build kernels
        return _identified(command, stamps)


@functools.lru_cache(maxsize=64)
def _identified(
    command: tuple[str, ...], stamps: tuple[tuple[object, ...], ...]
) -> Compiler:
    """Return the Compiler of a command. Raises CompilerMissing.

    With `-###`, GCC and Clang print the commands that they would run. These have all
    flags that a wrapper, the environment or the compiler's configuration adds, so they
    are part of the identity.
    """
    arguments = ("-###", *COMMON_FLAGS, "-S", "-o", os.devnull, "-x", "c++", os.devnull)
    code, output = _run((*command, *arguments))
    if code or "version" not in output:
        code, output = _run((*command, "--version"))
        if code or not output.strip():
            name = shlex.join(command)
            reply = output.strip().split("\n", 1)[0]
            raise CompilerMissing(
                f"{name} is no C++ compiler that can be used: asked for its version, "
                f"it ends with status {code}. Set CXX to one that can.\n{reply}".strip()
            )
        output = output.split("\n", 1)[0]
        is_gcc = output.split(" ", 1)[0].endswith("g++")
    else:
        is_gcc = "\ngcc version" in output
    identity = "\0".join((*command, *map(repr, stamps), output))
    return Compiler(command, identity, is_gcc and "clang" not in output)


def _run(command: Sequence[str]) -> tuple[int, str]:
    """Return the status of a command, and its output. Raises CompilerMissing."""
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
