"""fuseopt in environments of their own: the Pythons and torches that users have.

    make matrix
    python -m tests.tools.matrix --pythons 3.12 --torches 2.11 2.13
    python -m tests.tools.matrix --newest

In: interpreters, as `python3.12`, pyenv and uv have them, and a torch from where pip
takes its packages. Each pair gets an empty environment with the built wheel, without
the checkout; in it `python -m fuseopt doctor` and a few telling tests run. Out:
tests/tools/matrix.json, and docs/matrix.md from that. What was not asked for stays.

A CPU build of torch is taken where pip finds one. A GPU build comes with some gigabytes
of libraries; `--libraries DIR` takes those that were put into DIR by `pip install
--target DIR --no-deps nvidia-...`. `--newest`: this Python with the newest torch that
setup.cfg admits and pip can install; nothing is written, and the exit status says
whether all is well.
"""

from __future__ import annotations

import argparse
import email
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from fuseopt.config import CHECKED
from tests import ROOT
from tests.tools.matrix_page import PAIRS, PYTHONS, RECORD, TORCHES, Row, read, write

#: What of the checkout a wheel is built from, and what the tests read.
SOURCES = ("fuseopt", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
BESIDE_TESTS = ("tests", "setup.cfg")
#: Those that lean most on what Python and torch do not promise.
TESTS = (
    "tests/cli/test_cli.py",
    "tests/compat/test_guards.py",
    "tests/compat/test_states.py",
    "tests/compat/test_tomorrow.py",
    "tests/compat/test_trace_guards.py",
    "tests/compat/test_unchanged.py",
    "tests/compat/test_without.py",
    "tests/numerics/test_foreach.py",
    "tests/replicate/test_counters.py",
    "tests/inputs/test_lane_guard.py",
    "tests/runtime/test_structs.py",
    "tests/tails/test_tail.py",
)
#: The triton that torch is released with; a CPU build asks for none.
TRITON = {"2.11": "3.6.0", "2.12": "3.7.1", "2.13": "3.7.1"}
TOOLS = ("pytest", "pytest-timeout", "expecttest", "hypothesis", "numpy")
#: Packages of optimizers that those tests step. They ask for torch alone.
PACKAGES = ("lion-pytorch",)
#: A package whose name begins so is a library of a GPU's.
OF_A_GPU = re.compile(r"(nvidia|cuda|intel|rocm|onemkl|pytorch-triton-rocm)-")
LIMIT = 1800
#: A file of constraints that constrains nothing.
NO_CAP = "tests/tools/no_cap.txt"


class NotToBeHad(Exception):
    """There is no such environment here; the text says why."""


@dataclass(frozen=True)
class Torch:
    """A build of torch that pip found: its version, where it lies, what it asks for."""

    version: str
    address: str
    asks_for: tuple[str, ...]

    @property
    def for_gpu(self) -> bool:
        """Does it ask for libraries of a GPU?"""
        return any(OF_A_GPU.match(name) for name in self.asks_for)


def said(command: list[str | Path], **more: Any) -> subprocess.CompletedProcess[str]:
    """Run a command; its output as text. A machine's own cap on versions is lifted."""
    if "pip" in command and "env" not in more:
        more["env"] = {**os.environ, "PIP_CONSTRAINT": str(ROOT / NO_CAP)}
    return subprocess.run(
        [str(x) for x in command], capture_output=True, text=True, **more
    )


def done(command: list[str | Path], what: str, **more: Any) -> str:
    """Run a command that must succeed, and return what it prints."""
    ended = said(command, **more)
    if ended.returncode:
        lines = (ended.stderr.strip() or ended.stdout.strip() or "?").splitlines()
        errors = [x for x in lines if x.lower().startswith("error")] or lines[-1:]
        raise NotToBeHad(f"{what}: {errors[0].removeprefix('ERROR: ')}")
    return ended.stdout


# ------------------------------------------------------------------ interpreters


def candidates(minor: str) -> Iterator[Path]:
    """Places where an interpreter of this version may lie."""
    if found := shutil.which(f"python{minor}"):
        yield Path(found)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{minor}.*/bin/python{minor}"))
    if shutil.which("uv"):
        find: list[str | Path] = ["uv", "python", "find", minor]
        if said(find).returncode:
            said(["uv", "python", "install", minor])
        ended = said(find)
        if ended.returncode == 0:
            yield Path(ended.stdout.strip())


def interpreter(minor: str) -> Path:
    """An interpreter of this version that runs."""
    asks = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for path in candidates(minor):
        if said([path, "-c", asks]).stdout.strip() == minor:
            return path
    raise NotToBeHad(
        f"no interpreter: neither `python{minor}` nor pyenv has one, and uv "
        + ("could not install one" if shutil.which("uv") else "is not installed")
    )


# ------------------------------------------------------------------ environments


def wheel(folder: Path) -> Path:
    """The package, built from a copy of its sources alone."""
    sources = folder / "sources"
    sources.mkdir()
    for name in SOURCES:
        copied(ROOT / name, sources / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, sources]
    done(command, "the wheel is not built")
    (built,) = folder.glob("fuseopt-*.whl")
    return built


def asked_by(built: Path) -> list[str]:
    """What a wheel asks for, its extras left out."""
    with zipfile.ZipFile(built) as opened:
        (name,) = [x for x in opened.namelist() if x.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(opened.read(name))
    asked = map(Requirement, told.get_all("Requires-Dist", []))
    place = {"extra": ""}
    return [x.name for x in asked if x.marker is None or x.marker.evaluate(place)]


def copied(source: Path, target: Path) -> None:
    """Copy a file or a folder, without what runs left in it."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def constraints(folder: Path) -> Path:
    """The exact versions of the tests, but for torch and what it pins itself."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    kept = [
        x for x in text.splitlines() if not re.match("(torch|triton|setuptools)==", x)
    ]
    path = folder / "constraints.txt"
    path.write_text("\n".join(kept), encoding="utf-8")
    return path


def found_torch(python: Path, minor: str, version: str) -> Torch:
    """The torch that pip would take, and what it asks for on this interpreter."""
    command: list[str | Path] = [python, "-m", "pip", "install", "--dry-run"]
    command += ["--quiet", "--no-deps", "--ignore-installed", "--only-binary", ":all:"]
    command += ["--report", "-", f"torch=={version}.*"]
    report = json.loads(done(command, f"torch {version}"))
    (found,) = report["install"]
    place = {**report["environment"], "python_version": minor, "extra": ""}
    asked = [Requirement(x) for x in found["metadata"].get("requires_dist", [])]
    return Torch(
        found["metadata"]["version"],
        found["download_info"]["url"],
        tuple(
            f"{x.name}{x.specifier}"
            for x in asked
            if x.marker is None or x.marker.evaluate(place)
        ),
    )


def installed(
    home: Path, minor: str, version: str, built: Path, libraries: Path | None
) -> tuple[Path, Torch]:
    """An environment with the wheel and the torch: its interpreter, and the torch."""
    python, ready = home / "bin" / "python", home / "ready"
    pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet"]
    if not ready.exists():
        own = interpreter(minor)
        done([own, "-m", "venv", "--clear", home], "the environment is not made")
        done([*pip, "--upgrade", "pip"], "pip")
    torch = found_torch(python, minor, version)
    alone = [] if torch.for_gpu and libraries is None else ["--no-deps"]
    done([*pip, *alone, f"torch=={torch.version}"], "torch is not installed")
    if torch.for_gpu and libraries is not None:
        packages = done(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            "the environment has no packages",
        ).strip()
        for entry in libraries.iterdir():
            beside = Path(packages) / entry.name
            if not beside.exists():
                beside.symlink_to(entry.resolve())
    rest = [x for x in torch.asks_for if not OF_A_GPU.match(x)]
    if version in TRITON and not any(x.startswith("triton") for x in rest):
        rest.append(f"triton=={TRITON[version]}")
    # by name and without torch, whose libraries pip would fetch in other versions
    rest += [x for x in asked_by(built) if not re.match("torch|triton", x)]
    versions = ["--constraint", constraints(home)]
    done([*pip, *versions, *rest, *TOOLS], "what torch and fuseopt ask for")
    done([*pip, *versions, "--no-deps", *PACKAGES], "the packages of optimizers")
    # one that was kept has an older wheel of the same version
    done([*pip, "--no-deps", "--force-reinstall", built], "the wheel")
    ready.touch()
    return python, torch


# ------------------------------------------------------------------ what runs there


def variables(home: Path, **more: str) -> dict[str, str]:
    """The environment's variables: nothing of the checkout, nor of who runs this."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "FUSEOPT", "VIRTUAL_ENV", "TORCH"))
    }
    return {**kept, "HOME": str(home), "PYTHONNOUSERSITE": "1", **more}


def doctor(python: Path, home: Path) -> str:
    """What doctor says, in one word; what it finds wrong, where it does."""
    own = variables(home, XDG_CACHE_HOME=str(home / "cache"))
    command = [python, "-m", "fuseopt", "doctor", "--json"]
    ended = said(command, cwd=home, env=own, timeout=LIMIT)
    try:
        findings = json.loads(ended.stdout)["findings"]
    except ValueError:
        told = ended.stderr.strip().replace(str(home), "…")
        return f"ended with {ended.returncode}: {told[-200:]}"
    bad = [f"{x['name']}: {x['text']}" for x in findings if x["state"] != "ok"]
    return "; ".join(bad).replace(str(home), "…") or (
        "ok" if ended.returncode == 0 else "failed"
    )


def tested(python: Path, home: Path, cache: Path, tests: list[str]) -> dict[str, Any]:
    """Run the tests beside a copy of themselves; how many passed, and which did not."""
    work = home / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for name in BESIDE_TESTS:
        copied(ROOT / name, work / name)
    inside = "import fuseopt; print(fuseopt.__file__)"
    own = variables(home, XDG_CACHE_HOME=str(cache), COLUMNS="200")
    where = done([python, "-c", inside], "fuseopt is not there", cwd=work, env=own)
    assert where.startswith(str(home)), where
    command: list[str | Path] = [python, "-m", "pytest", *tests, "-q", "--tb=line"]
    command += ["-m", "not slow and not gpu", "-p", "no:cacheprovider", "-rfE"]
    try:
        ended = said(command, cwd=work, env=own, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return {"failures": (f"the tests took more than {LIMIT} s",)}
    print(ended.stdout[-6000:], file=sys.stderr)
    last = (ended.stdout.strip().splitlines() or [""])[-1]
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    }
    found = failed(ended.stdout)
    if ended.returncode and not found:
        found = [f"pytest ended with {ended.returncode}: {last or ended.stderr[-300:]}"]
    return {
        "passed": counts.get("passed", 0),
        "skipped": counts.get("skipped", 0),
        "failures": tuple(found),
    }


def failed(told: str) -> list[str]:
    """The tests that pytest's short summary lists, whose names may have spaces."""
    lines = re.findall(r"^(?:FAILED|ERROR) (.+)", told, re.MULTILINE)
    return [x.split(" - ")[0].strip() for x in lines]


def newest(python: Path | str, under: str = "") -> str:
    """The newest torch that pip finds, as "2.15"; `under`: before this version."""
    command: list[str | Path] = [python, "-m", "pip", "install", "--dry-run", "--quiet"]
    command += ["--no-deps", "--ignore-installed", "--only-binary", ":all:"]
    command += ["--report", "-", f"torch<{under}" if under else "torch"]
    report = json.loads(done(command, "the newest torch"))
    (found,) = report["install"]
    return ".".join(found["metadata"]["version"].split(".")[:2])


def row(
    minor: str, version: str, built: Path, folder: Path, options: argparse.Namespace
) -> Row:
    """What one pair gives."""
    home = folder / f"python{minor}-torch{version}"
    made = Row(minor, version)
    try:
        python, torch = installed(home, minor, version, built, options.libraries)
        asks = "import platform as p, importlib.metadata as m; print("
        asks += "p.python_version(), m.version('torch'), m.version('triton'))"
        own = variables(home)
        told = done([python, "-c", asks], "it does not start", env=own).split()
        made = made.but(python_found=told[0], torch_found=told[1], triton=told[2])
        made = made.but(build="GPU" if torch.for_gpu else "CPU")
        made = made.but(doctor=doctor(python, home))
        cache = folder / "cache"
        made = made.but(**tested(python, home, cache, options.tests))
    except NotToBeHad as reason:
        made = made.but(reason=str(reason))
    if not options.keep:
        shutil.rmtree(home, ignore_errors=True)
    return made


def main() -> int:
    """Run the pairs that were asked for; 1 where one of them fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pythons", nargs="+", default=PYTHONS, metavar="3.x")
    parser.add_argument("--torches", nargs="+", metavar="2.x")
    parser.add_argument("--newest", action="store_true", help="this Python, no record")
    parser.add_argument("--tests", nargs="+", default=TESTS, metavar="FILE")
    parser.add_argument("--libraries", type=Path, help="of a GPU build, shared")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="environments there")
    options = parser.parse_args()
    ran = []
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="matrix-ä-") as made:
        folder = options.keep or Path(made)
        built = wheel(Path(made))
        pairs = newest_first() if options.newest else iter(asked_for(options))
        for minor, version in pairs:
            found = row(minor, version, built, folder.resolve(), options)
            print(found, file=sys.stderr, flush=True)
            ran.append(found)
            if options.newest and found.torch_found:
                break  # an older one stands in for a torch that is not to be had
            if not options.newest:
                # read now: another run may have written what it found
                rows = {(x.python, x.torch): x for x in [*read(RECORD), found]}
                write(rows.values())
    if options.newest:
        print(*(line for x in ran for line in summary(x)), sep="\n")
        last = ran[-1]
        return int(not last.passed or last.doctor != "ok" or _failed(ran))
    return int(_failed(ran))


def _failed(rows: list[Row]) -> bool:
    return any(x.failures for x in rows)


def summary(row: Row) -> Iterator[str]:
    """What one pair came to, in lines."""
    yield f"Python {row.python}, torch {row.torch_found or row.torch}: {row.reason}"
    yield f"doctor: {row.doctor}"
    yield from row.failures
    yield f"{row.passed} passed, {len(row.failures)} failed, {row.skipped} skipped"


def _own() -> str:
    """The version of the Python that runs this, as "3.11"."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def asked_for(options: argparse.Namespace) -> list[tuple[str, str]]:
    """The pairs to run: a Python, a torch."""
    if options.torches:
        return [(x, y) for x in options.pythons for y in options.torches]
    pairs = [pair for pair in PAIRS if pair[0] in options.pythons]
    latest = newest(sys.executable)
    if latest not in TORCHES:
        pairs.append((_own(), latest))
    return pairs


def newest_first() -> Iterator[tuple[str, str]]:
    """This Python with each torch that setup.cfg admits, the newest first."""
    end = ".".join(map(str, CHECKED[1]))
    while True:
        end = newest(sys.executable, end)
        yield _own(), end


if __name__ == "__main__":
    sys.exit(main())
