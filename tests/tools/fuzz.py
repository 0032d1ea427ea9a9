"""Random optimizers, sequences of events or stores against eager, for `make fuzz`.

A process judges one seed after another: tests/numerics/test_fuzz_optimizers.py,
fuzz_events.py or test_fuzz_stores.py. It may crash or hang; the seeds of other
processes go on. The result of a seed is written at once, as one line of JSON, to the
file of the first seed. So a run that was stopped, or that ended after `--seconds`,
continues where it was, and repeats only the seeds that failed. The last line printed
sums up all results of the file. The exit status is 1 if a seed differs, crashes, hangs
or is missing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "build" / "fuzz"
#: So many seconds a seed may take: reduced ones take the longest.
PATIENCE = 400.0
#: A process is replaced after so many seeds.
SEEDS_OF_A_PROCESS = 300
#: What became of a seed that is no failure begins with one of these.
FINE = ("led", "whole", "eager", "refused", "raised", "of dynamo", "alike")
#: What may be fuzzed.
KINDS = ("optimizers", "events", "stores")
#: Reasons that are told apart in the summary.
REASONS = 8


def judge_of(kind: str, folder: Path) -> Callable[[int], dict[str, Any]]:
    """The function that judges a seed."""
    if kind == "events":
        from tests.numerics import fuzz_events

        return fuzz_events.judge_seed
    if kind == "stores":
        from tests.numerics import test_fuzz_stores

        return lambda seed: test_fuzz_stores.judge_seed(seed, folder)
    from tests.numerics.test_fuzz_optimizers import judge_seed

    return lambda seed: {"ways": judge_seed(seed, folder)}


def work(kind: str) -> None:
    """Judge each seed that a line of the input names; print what became of it."""
    # every step is to be a compiled one, also where eager would be faster
    os.environ["FUSEOPT_EAGER_IF_FASTER"] = "0"
    from tests.numerics.fuzz_process import settle

    settle()
    with tempfile.TemporaryDirectory() as name:
        judge = judge_of(kind, Path(name))
        for line in sys.stdin:
            try:
                found = judge(int(line))
            except AssertionError as error:
                found = {"wrong": str(error)}
            print(f"\n@{json.dumps(found)}", flush=True)


class Worker:
    """A process that judges seeds; another one after a crash."""

    def __init__(self, kind: str, patience: float) -> None:
        self.kind = kind
        self.process: subprocess.Popen[bytes] | None = None
        self.patience = patience
        self.seeds = 0

    def judge(self, seed: int) -> dict[str, Any]:
        """What became of a seed: "ways", or "wrong" and how."""
        if self.process is None or self.seeds >= SEEDS_OF_A_PROCESS:
            self.end()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.tools.fuzz", "--worker", self.kind],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self.seeds = 0
        self.seeds += 1
        process = self.process
        assert process.stdin is not None
        process.stdin.write(b"%d\n" % seed)
        process.stdin.flush()
        for line in self.lines(process):
            if line.startswith(b"@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
        running = process.poll() is None
        self.end()
        if running:
            return {"wrong": f"seed {seed}: no end within {self.patience:.0f} s"}
        return {"wrong": f"seed {seed}: the process ended with {process.returncode}"}

    def lines(self, process: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """What the process prints, until it ends or its time is up."""
        assert process.stdout is not None
        out = process.stdout.fileno()
        until, kept = time.monotonic() + self.patience, b""
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while selector.select(max(0.0, until - time.monotonic())):
                read = os.read(out, 1 << 16)
                if not read:
                    process.wait()
                    return
                *whole, kept = (kept + read).split(b"\n")
                yield from whole

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def code() -> str:
    """A short hash of all that is tested."""
    found = hashlib.sha256()
    for path in sorted((ROOT / "fuseopt").rglob("*")):
        if path.suffix in (".py", ".h"):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


class Log:
    """What is written down of the seeds of a run; the last line of a seed counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.code = code()
        self.found: dict[int, dict[str, Any]] = {}
        if path.exists():
            for line in path.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.found[entry["seed"]] = entry

    def add(self, seed: int, found: dict[str, Any]) -> None:
        entry = {"seed": seed, "code": self.code, **found}
        self.found[seed] = entry
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def wrong(self) -> list[int]:
        return [seed for seed, entry in self.found.items() if "wrong" in entry]


def reason(told: str) -> str:
    """Of an outcome such as "eager: because of p.x at FILE:7", without names."""
    told = re.sub(r"\S*/\S*?(optimizer_\d+\.py):\d+", "the step", told)
    return re.sub(r"\b\d+\b|(?<=\w)\d+\b", "N", told)[:120]


def way_told(outcomes: Sequence[str]) -> str:
    """How many of each outcome, and of what reasons, most frequent first."""
    kinds = Counter(told.partition(":")[0] for told in outcomes)
    parts = []
    for kind, count in sorted(kinds.items(), key=lambda kc: FINE.index(kc[0])):
        reasons = Counter(
            reason(told.partition(": ")[2])
            for told in outcomes
            if told.startswith(f"{kind}: ")
        )
        text = f"{count:,} {kind}"
        if reasons:
            most = reasons.most_common(REASONS)
            text += " (" + "; ".join(f"{n} {why}" for why, n in most)
            rest = len(reasons) - len(most)
            text += f"; {rest} other reasons)" if rest else ")"
        parts.append(text)
    return ", ".join(parts)


def summary(log: Log) -> str:
    """What became of all seeds that are written down."""
    entries = log.found.values()
    wrong = [entry["wrong"] for entry in entries if "wrong" in entry]
    silent = sum("Silent" in text.partition("\n")[0] for text in wrong)
    ways: dict[str, list[str]] = {}
    for entry in entries:
        for way, told in entry.get("ways", {}).items():
            ways.setdefault(way, []).append(told)
    lines = [f"{way}: {way_told(told)}" for way, told in sorted(ways.items())]
    versions = len({entry.get("code") for entry in entries})
    if versions > 1:
        lines.append(f"by {versions} versions of fuseopt, for it changed meanwhile")
    what = f"{len(log.found):,} seeds"
    if sequences := sum(entry.get("sequences", 0) for entry in entries):
        what += f" with {sequences:,} sequences"
    lines.append(
        f"{what}, {silent} silent differences, "
        f"{len(wrong) - silent} that raised what eager does not, crashed or hung"
    )
    return "\n".join(lines)


def run(
    kind: str,
    seeds: Sequence[int],
    log: Log,
    jobs: int,
    seconds: float,
    patience: float,
) -> None:
    """Judge what is not written down, or failed, in `jobs` processes."""
    left = iter([s for s in seeds if s not in log.found or s in log.wrong()])
    until = time.monotonic() + seconds

    def share(_: int) -> None:
        worker = Worker(kind, patience)
        try:
            while time.monotonic() < until:
                seed = next(left, None)
                if seed is None:
                    return
                found = worker.judge(seed)
                log.add(seed, found)
                if "wrong" in found:
                    print(f"{'=' * 80}\n{found['wrong']}", flush=True)
        finally:
            worker.end()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(share, range(jobs)))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz")
    parser.add_argument("kind", nargs="?", default="optimizers", choices=KINDS)
    parser.add_argument("--count", type=int, default=2000, help="so many seeds")
    parser.add_argument("--first", type=int, help="the first one; else any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1e9, help="then stop")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="seconds for a seed"
    )
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        work(given.worker)
        return 0
    first = random.randrange(2**31) if given.first is None else given.first
    print(f"the same again, or what is left: --first {first}", flush=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = f"{first}" if given.kind == "optimizers" else f"{given.kind}-{first}"
    log = Log(FOLDER / f"{name}.jsonl")
    run(
        given.kind,
        range(first, first + given.count),
        log,
        given.jobs,
        given.seconds,
        given.patience,
    )
    print(summary(log))
    return int(bool(log.wrong()) or len(log.found) < given.count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
