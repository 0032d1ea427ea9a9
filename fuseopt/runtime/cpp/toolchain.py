"""The C++ compiler: find it, its flags, and the identity by which kernels are cached.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...codegen import Source
from ...errors import CompilerMissing
from ...locks import new_lock

#: Of the processor that is here: what is not built for others.
NATIVE = "-march=native"
#: Of x86-64: memory is the limit, and wide registers keep more of it under way.
WIDE = "-mprefer-vector-width=512"
COMMON_FLAGS = (
    "-std=c++17",
    # loops vectorized as with -O3, the rest compiled a third faster
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    NATIVE,
    "-fPIC",
    "-shared",
    "-fopenmp",
    # <math.h> as C has it: libstdc++'s brings templates, a third of all that is read
    "-D_GLIBCXX_INCLUDE_NEXT_C_HEADERS",
    "-fno-math-errno",
    "-fwrapv",  # integers overflow as they do in eager
    "-fno-trapping-math",
    "-w",
    *((WIDE,) if platform.machine() == "x86_64" else ()),
)
EXACT_FLAGS = ("-ffp-contract=off",)
#: Before all others: it takes back what $CXX may allow.
STRICT_FLAGS = ("-fno-fast-math",)
#: For source that neither throws nor catches: all but the library of the guards.
PLAIN_FLAGS = ("-fno-exceptions",)
#: What GCC links then; by default it adds the C++ library, which no kernel calls and
#: which takes longer to read than all others.
GCC_LIBRARIES = ("-nodefaultlibs", "-lgomp", "-lm", "-lc", "-lgcc")
FAST_FLAGS = ("-ffp-contract=fast", "-fassociative-math", "-fno-signed-zeros")
#: The least source that a compiler must be able to compile with the flags of a kernel.
TRIAL = "#include <math.h>\n#include <stdint.h>\n" + 'extern "C" void trial() {}\n'
#: Files up to this size may be scripts; their contents are a part of the identity.
SCRIPT = 1 << 16
#: The lines of a compiler's output that messages show.
LINES = 12
#: What GCC and Clang look for headers in, besides what they are told by flags.
HEADERS = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")

_asking = new_lock()


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command, and all that its output depends on (`identity`)."""

    command: tuple[str, ...]
    identity: str
    is_gcc: bool

    @property
    def path(self) -> str:
        """The program that is called."""
        return self.command[0]

    @property
    def name(self) -> str:
        """The command as one string, for messages."""
        return shlex.join(self.command)

    def flags(self, source: Source, fast: bool) -> tuple[str, ...]:
        """The arguments before the source."""
        return flags_of(source, fast)

    def libraries(self, source: Source) -> tuple[str, ...]:
        """The libraries that are linked; the arguments after the source."""
        return GCC_LIBRARIES if self.is_gcc and not source.throws else ()

    def key(self, source: Source, fast: bool) -> str:
        """The name under which a library is kept: a hash of all that it depends on."""
        arguments = " ".join((*self.flags(source, fast), *self.libraries(source)))
        return name_of(source.text, self.identity, arguments, processor())


def flags_of(source: Source, fast: bool, march: str = "") -> tuple[str, ...]:
    """The flags of a kernel, for this processor or a level such as "x86-64-v3"."""
    common = COMMON_FLAGS
    if march:
        wide = (WIDE,) if march.startswith("x86-64") else ()
        common = tuple([f"-march={march}" if x == NATIVE else x for x in common])
        common = (*(x for x in common if x != WIDE), *wide)
    exact = (*STRICT_FLAGS, *common, *EXACT_FLAGS)
    flags = (*common, *FAST_FLAGS) if fast else exact
    return flags if source.throws else (*flags, *PLAIN_FLAGS)


def name_of(text: str, identity: str, arguments: str, runs_on: str) -> str:
    """The name of a library: a hash of its text, what builds it, and what runs it."""
    content = "\0".join((text, identity, arguments, runs_on))
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:32]


@functools.cache
def processor() -> str:
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
    """The words of $CXX, programs among them as paths. Raises CompilerMissing."""
    whole = shutil.which(wanted)  # a path with spaces, of which nobody quoted any
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
    # the working directory of a compilation is another one
    arguments = (os.path.abspath(w) if _is_program(w) else w for w in words[1:])
    return (os.path.abspath(path), *arguments)


def _is_program(word: str) -> bool:
    return os.sep in word and os.access(word, os.X_OK) and os.path.isfile(word)


def _stamps(command: Sequence[str]) -> tuple[tuple[object, ...], ...]:
    """The identity of each program of a command: path, size, time, digest of a script;
    and the folders of headers that the environment names, which `-###` does not show.

    A wrapper script may change its flags while its size and time stay the same; so its
    contents are hashed.
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
    with _asking:  # kernels are built by several threads
        return _identified(command, stamps)


@functools.lru_cache(maxsize=64)
def _identified(
    command: tuple[str, ...], stamps: tuple[tuple[object, ...], ...]
) -> Compiler:
    """The Compiler of a command. Raises CompilerMissing.

    With `-###`, GCC and Clang print the commands that they would run, with all flags
    that a wrapper, the environment or the compiler's configuration adds: these are part
    of the identity.
    """
    arguments = ("-###", *COMMON_FLAGS, "-S", "-o", os.devnull, "-x", "c++", os.devnull)
    code, output = _ask((*command, *arguments))
    if code or "version" not in output:
        code, output = _ask((*command, "--version"))
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


def _ask(command: Sequence[str]) -> tuple[int, str]:
    """The status of a command, and its output. Raises CompilerMissing."""
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
