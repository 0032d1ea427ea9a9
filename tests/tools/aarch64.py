"""An aarch64 torch under an emulator: `python -m tests.tools.aarch64 --make`.

The machine needs `mmdebstrap`, `qemu-user` and `g++-aarch64-linux-gnu` (Debian's names)
and pip. Into a folder go

- `tree`: Debian's files for aarch64, of which Python is run;
- `site`: torch and what the tests need, for aarch64;
- `stubs`: libraries with the names that torch's build for GPUs asks the loader for,
  each of whose functions returns 100, "no device". No call on a CPU reaches them.

The emulator runs Python and torch. The compiler is the cross compiler of this machine.

    python -m tests.tools.aarch64 -m fuseopt verify torch.optim:AdamW
    python -m tests.tools.aarch64 -m pytest tests/numerics/test_float16.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests import ROOT

HOME = Path(os.environ.get("FUSEOPT_AARCH64", ROOT / "build" / "aarch64"))
#: Programs, and the packages of Debian that bring them.
PROGRAMS = {
    "qemu-aarch64": "qemu-user",
    "aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu",
    "mmdebstrap": "mmdebstrap",
}
#: What is emulated: NEON and halves, without SVE.
PROCESSOR = "neoverse-n1"
PYTHON = "3.11"
DEBIAN = "bookworm"
TORCH = ("torch==2.13.0", "triton==3.7.1", "torchvision==0.28.0")
#: Of packages that are pure Python, or have wheels for aarch64.
PACKAGES = (
    "sympy networkx jinja2 fsspec typing_extensions numpy filelock platformdirs "
    "setuptools pytest pytest-timeout hypothesis expecttest"
).split()
#: Without what they ask for.
OPTIMIZERS = (
    "adabelief-pytorch adan-pytorch dadaptation lion-pytorch madgrad pytorch-optimizer "
    "schedulefree timm torch-optimi torch-optimizer pytorch-ranger tabulate pillow"
).split()
#: What libraries look for in /proc and /sys, which are else those of this machine.
CPUINFO = """processor\t: {number}
BogoMIPS\t: 50.00
Features\t: fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid \
asimdrdm lrcpc dcpop asimddp
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x3
CPU part\t: 0xd0c
CPU revision\t: 1

"""
MIDR = "0x00000000413fd0c1\n"
#: The compiler as the emulated processor's own would be: "native" is that processor.
COMPILER = f"""#!/bin/bash
words=()
for word in "$@"; do
  [ "$word" = -march=native ] && word=-mcpu={PROCESSOR}
  words+=("$word")
done
exec aarch64-linux-gnu-g++ "${{words[@]}}"
"""
#: Libraries of a GPU's, and their functions, begin so.
LIBRARIES = ("libcu", "libnv", "libnccl")
FUNCTIONS = re.compile(r"_*(cu|nvrtc|nccl|nvshmem|nvtx|nvJit)", re.IGNORECASE)
#: Symbols of no version lie in the library that torch always loads.
LOADED = "libcudart.so.13"
#: A version that is not named as its library is.
VERSIONS = {"": LOADED, "NVSHMEM": "libnvshmem_host.so.3"}


def missing() -> str:
    """What is not there to run an aarch64 torch, with the remedy; or ""."""
    lacking = [p for name, p in PROGRAMS.items() if shutil.which(name) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    if not (HOME / "site" / "torch").is_dir():
        return f"no aarch64 torch in {HOME}: python -m tests.tools.aarch64 --make"
    return ""


def command(*arguments: str | Path) -> list[str]:
    """What runs the emulated Python."""
    return [
        *("qemu-aarch64", "-cpu", PROCESSOR, "-L", str(HOME / "tree")),
        *("-E", f"LD_LIBRARY_PATH={HOME / 'stubs'}"),
        str(HOME / "tree" / "usr" / "bin" / f"python{PYTHON}"),
        *map(str, arguments),
    ]


def environment(*paths: Path, **more: str) -> dict[str, str]:
    """What it runs in; `paths`: where modules are, before those of the folder."""
    where = os.pathsep.join(map(str, (*paths, HOME / "site")))
    given = {"PYTHONPATH": where, "CXX": str(HOME / "cxx"), "OMP_NUM_THREADS": "1"}
    return {**os.environ, "KINETO_LOG_LEVEL": "6", **given, **more}


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run the emulated Python in the checkout, with its output caught."""
    return subprocess.run(  # type: ignore[call-overload, no-any-return]
        command(*arguments),
        cwd=options.pop("cwd", ROOT),
        env=env or environment(ROOT),
        capture_output=True,
        text=True,
        **options,
    )


# -------------------------------------------------------------------- making the folder


def make() -> None:
    """Fill the folder; what is there stays."""
    HOME.mkdir(parents=True, exist_ok=True)
    if not (HOME / "tree").exists():
        _tree(HOME / "tree")
    _pip("--no-deps", *TORCH)
    _pip(*PACKAGES)
    _pip("--no-deps", *OPTIMIZERS)
    _stubs(HOME / "site" / "torch" / "lib", HOME / "stubs")
    (HOME / "cxx").write_text(COMPILER)
    (HOME / "cxx").chmod(0o755)


def _tree(tree: Path) -> None:
    names = f"python{PYTHON},libpython{PYTHON},libgomp1,libstdc++6,zlib1g"
    new = tree.with_name("tree.new")
    shutil.rmtree(new, ignore_errors=True)
    options = ["--arch=arm64", "--variant=extract", f"--include={names}"]
    subprocess.run(["mmdebstrap", *options, DEBIAN, str(new)], check=True)
    (new / "proc").mkdir(exist_ok=True)
    cpus = range(os.cpu_count() or 1)
    text = "".join(CPUINFO.format(number=number) for number in cpus)
    (new / "proc" / "cpuinfo").write_text(text)
    for number in cpus:
        folder = new / "sys" / "devices" / "system" / "cpu" / f"cpu{number}"
        folder = folder / "regs" / "identification"
        folder.mkdir(parents=True)
        (folder / "midr_el1").write_text(MIDR)
    new.rename(tree)


def _pip(*names: str) -> None:
    words = ["install", "--quiet", "--upgrade", "--no-compile", "--target", "site"]
    words += ["--only-binary", ":all:", "--python-version", PYTHON]
    words += ["--implementation", "cp"]
    for glibc in ("2_28", "2_27", "2_17"):
        words += ["--platform", f"manylinux_{glibc}_aarch64"]
    words += ["--platform", "manylinux2014_aarch64"]
    for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none"):
        words += ["--abi", abi]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, *words, *names], check=True, cwd=HOME)


def _stubs(libraries: Path, out: Path) -> None:
    """A library for each that torch asks for of a GPU, with the functions it names."""
    out.mkdir(exist_ok=True)
    wanted: set[str] = set()
    versions: dict[str, set[str]] = defaultdict(set)
    defined: set[str] = set()
    for path in libraries.glob("*.so*"):
        wanted |= {*re.findall(r"\(NEEDED\).*\[(.+)\]", _readelf("--dynamic", path))}
        for line in _readelf("--dyn-syms", path).splitlines():
            words = line.split()
            if len(words) < 8:
                continue
            name, _, version = words[7].partition("@")
            if words[6] == "UND":
                versions[name].add(version.lstrip("@"))
            else:
                defined.add(name)
    symbols: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(versions.keys() - defined):
        if FUNCTIONS.match(name):
            for version in versions[name]:
                library = VERSIONS.get(version, version)
                symbols[library][version].append(name)
    for library in sorted(wanted):
        if library.startswith(LIBRARIES) and not (libraries / library).exists():
            _stub(out / library, symbols[library])


def _stub(path: Path, symbols: Mapping[str, Iterable[str]]) -> None:
    lines, script = [".text"], ""
    for version, names in symbols.items():
        for name in names:
            lines += [f".globl {name}", f".type {name}, %function", f"{name}:"]
        if version:
            script += f"{version} {{ {' '.join(f'{x};' for x in names)} }};\n"
    text, said = path.with_suffix(".s"), path.with_suffix(".version")
    text.write_text("\n".join([*lines, "mov w0, #100", "ret", ""]))
    words = ["-shared", "-nostdlib", f"-Wl,-soname,{path.name}", "-o", path, text]
    if script:
        said.write_text(script)
        words.append(f"-Wl,--version-script={said}")
    subprocess.run(["aarch64-linux-gnu-gcc", *words], check=True)


def _readelf(what: str, path: Path) -> str:
    asked = ["aarch64-linux-gnu-readelf", "--wide", what, path]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Make the folder, or run the emulated Python with the arguments."""
    if sys.argv[1:] == ["--make"]:
        make()
        return
    if missing():
        sys.exit(missing())
    os.chdir(ROOT)
    os.execvpe("qemu-aarch64", command(*sys.argv[1:]), environment(ROOT))


if __name__ == "__main__":
    main()
