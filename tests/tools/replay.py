"""Process replay: does a change of the code change what the tests compile?

As a pytest plugin (`-p tests.tools.replay --replay FOLDER`) it writes down, for each
graph that a test compiles, the text of the Graph and of the Schedule, the source and
the launch layout of each kernel, and the words of each table that is bound. Texts are
kept under their hash, so that a folder of 10,000 graphs is small.

As a program it compares two such recordings (`python -m tests.tools.replay OLD NEW`),
prints the first difference of each kind, and exits with 1 if there is one. `make
replay` records the last commit, unless that was done before, and the working tree, and
compares them.

Addresses are not recorded: tables hold positions in a pool, and the pool is left out.
Nor are the files and lines of calls.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import difflib
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

#: Where `make replay` keeps its recordings, by commit.
FOLDER = ROOT / ".replay"
#: What `make replay` runs: all that CI runs, with the same random programs each time.
SELECTION = ["tests", "-m", "not slow and not gpu", "--hypothesis-seed=0"]
#: Lines of a difference that are printed.
SHOWN = 40
#: The file and the line of a call, which a moved or renamed file changes.
PLACE = re.compile(r"# \S+:\d+: ")
#: Lanes of a list that are written out: enough to see that lanes are told apart.
LANES = 64

# ---------------------------------------------------------------- recording


class Recorder:
    """Writes down what is compiled while tests run; one file for each worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.test = ""
        self.entries: list[tuple[str, str]] = []
        (folder / "texts").mkdir(parents=True, exist_ok=True)
        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self.out = folder / f"{worker}.jsonl"
        self.out.write_text("")

    def note(self, kind: str, text: str) -> None:
        """Keep one text of the test that runs, paths in it relative to the checkout."""
        text = text.replace(f"{ROOT}{os.sep}", "")
        digest = hashlib.sha256(text.encode()).hexdigest()
        path = self.folder / "texts" / f"{digest}.gz"
        if not path.exists():
            own = path.with_suffix(f".{os.getpid()}")
            own.write_bytes(gzip.compress(text.encode(), 1))
            own.replace(path)
        self.entries.append((kind, digest))

    def begin(self, test: str) -> None:
        """A test begins: what follows is its own."""
        self.test, self.entries = test, []

    def end(self) -> None:
        """Write one line for the test that ends, if it compiled anything."""
        if self.entries:
            line = {"test": self.test, "entries": self.entries}
            with self.out.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")


def watch(recorder: Recorder) -> Iterator[Callable[[], None]]:
    """Wrap what makes schedules, sources and tables; yields what undoes each wrap."""
    from fuseopt.codegen.cpp import kernel as cpp_kernel
    from fuseopt.codegen.triton import kernel as triton_kernel
    from fuseopt.compiler import pipeline
    from fuseopt.ir import printer
    from fuseopt.runtime.cpp import table

    def wrap(owner: Any, name: str, after: Callable[..., None]) -> Callable[[], None]:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = inner(*args, **kwargs)
            after(result, *args)
            return result

        setattr(owner, name, wrapped)
        return lambda: setattr(owner, name, inner)

    def scheduled(schedule: Any, graph: Any, *_: Any) -> None:
        text = printer.show_graph(graph, LANES)
        recorder.note("graph", PLACE.sub("# ", text))
        recorder.note("schedule", printer.show_schedule(graph, schedule, LANES))

    def rendered(source: Any, target: Any, kernel: Any) -> None:
        recorder.note(f"source of {target.name}", source.text)
        recorder.note(f"layout of {target.name}", repr(source.layout))

    def bound(_: Any, own: Any, *__: Any) -> None:
        words = {
            name: getattr(own, name).tolist()
            for name in ("position", "row", "rows", "start", "geometry", "strided")
        }
        lines = [f"{name}: {value}" for name, value in words.items()]
        places = own.symbols and own.symbols.places
        recorder.note("table", "\n".join([*lines, f"symbols: {places}"]))

    yield wrap(pipeline, "schedule", scheduled)
    yield wrap(cpp_kernel.CppTarget, "render", rendered)
    yield wrap(triton_kernel.TritonTarget, "render", rendered)
    yield wrap(table.VariantTable, "__init__", bound)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--replay", help="a folder to record what tests compile in")


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    yield
    folder = session.config.getoption("--replay")
    # with xdist, tests run in workers alone
    controls = session.config.pluginmanager.hasplugin("dsession")
    if folder and not controls:
        recorder = Recorder(Path(folder))
        session.config.stash[_RECORDER] = recorder
        list(watch(recorder))


_RECORDER: pytest.StashKey[Recorder] = pytest.StashKey()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    recorder = item.config.stash.get(_RECORDER, None)
    if recorder is not None:
        recorder.begin(item.nodeid)
    result = yield
    if recorder is not None:
        recorder.end()
    return result


# ---------------------------------------------------------------- comparing


def load(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """What a recording holds: by test, kinds and hashes of texts, in order."""
    found: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found[entry["test"]] = [(kind, digest) for kind, digest in entry["entries"]]
    return found


def text_of(folder: Path, digest: str) -> list[str]:
    """The lines of a text of a recording."""
    data = gzip.decompress((folder / "texts" / f"{digest}.gz").read_bytes())
    return data.decode().splitlines()


def compare(old: Path, new: Path) -> int:
    """Print how two recordings differ; how many tests differ.

    Texts of one test are compared as a bag: kernels are built by several threads.
    Tests that only one of the recordings has are counted, and are no difference.
    """
    before, after = load(old), load(new)
    shared = sorted(before.keys() & after.keys())
    texts = sum(len(after[test]) for test in shared)
    shown: set[str] = set()
    differing = 0
    for test in shared:
        gone = collections.Counter(before[test]) - collections.Counter(after[test])
        come = collections.Counter(after[test]) - collections.Counter(before[test])
        differing += bool(gone or come)
        for kind in sorted({kind for kind, _ in (*gone, *come)} - shown):
            shown.add(kind)
            print(f"\n{kind} of {test}:")
            _show(old, new, *(_first(x, kind) for x in (gone, come)))
    only = [len(x.keys() - y.keys()) for x, y in ((before, after), (after, before))]
    print(
        f"\n{texts} texts of {len(shared)} tests compared: {differing} tests differ. "
        f"Not compared: {only[0]} tests that are gone, {only[1]} that are new."
    )
    return differing


def _first(bag: collections.Counter[tuple[str, str]], kind: str) -> str:
    return next((digest for found, digest in bag if found == kind), "")


def _show(old: Path, new: Path, gone: str, come: str) -> None:
    before = text_of(old, gone) if gone else []
    after = text_of(new, come) if come else []
    lines = list(difflib.unified_diff(before, after, "before", "after", "", "", 3, ""))
    print("\n".join(line[:200] for line in lines[:SHOWN]))
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} lines more")


# ---------------------------------------------------------------- make replay


def record(tree: Path, folder: Path, flags: Sequence[str]) -> None:
    """Run the tests of a checkout and record them. Raises where tests fail."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.tools.replay", "-q"]
    command += ["--replay", str(folder), *(flags or [*SELECTION, "-n", "auto"])]
    known = os.environ.get("PYTHONPATH", "")
    paths = os.pathsep.join([str(tree), *([known] if known else [])])
    done = subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": paths})
    # 5: the flags select no test of this commit
    if done.returncode not in (0, 5):
        print(f"tests fail in {tree}: what they compiled is compared all the same")


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A commit's files, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> int:
    """Compare two recordings, or record what is missing and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path, help="OLD NEW: only compare")
    parser.add_argument("--base", default="HEAD", help="the commit to compare with")
    parser.add_argument("--tests", nargs=argparse.REMAINDER, default=[])
    given = parser.parse_args()
    if given.folders:
        old, new = given.folders
        return 1 if compare(old, new) else 0
    found = ["git", "-C", str(ROOT), "rev-parse", "--short", given.base]
    commit = subprocess.run(found, check=True, capture_output=True, text=True).stdout
    selection = hashlib.sha256(" ".join(given.tests).encode()).hexdigest()[:8]
    old = FOLDER / f"{commit.strip()}-{selection}"
    if not old.exists():
        part = old.with_name(old.name + ".part")
        with checkout(given.base) as tree:
            record(tree, part, given.tests)
        part.rename(old)
    new = FOLDER / f"tree-{selection}"
    for path in new.glob("*.jsonl"):
        path.unlink()
    record(ROOT, new, given.tests)
    return 1 if compare(old, new) else 0


if __name__ == "__main__":
    sys.exit(main())
