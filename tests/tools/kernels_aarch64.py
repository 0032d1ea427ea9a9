"""Kernels of aarch64 for each float32 row of docs/conformance.json, under an emulator.

    python -m tests.tools.kernels_aarch64 FOLDER

First, each optimizer whose bits are equal here runs its course here, and each graph
that fuseopt compiles goes into FOLDER. Then the emulator builds the kernels of each
graph, launches them on made-up numbers, and compares the result with the interpreter of
the IR. The interpreter computes each op with the functions of torch's aarch64 build.

Nothing of Dynamo runs under the emulator, so an optimizer takes seconds there and not
minutes. docs/conformance-aarch64.json has the outcomes as `kernels`. Outcomes that are
there already are not determined again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.tools import aarch64
from tests.tools.conformance_aarch64 import read_record, write_record

CONFORMANCE = ROOT / "docs" / "conformance.json"
#: Optimizers that one process records.
TOGETHER = 12


def targets() -> list[str]:
    """Return the optimizers with equal bits in float32: `module:Class`."""
    rows = json.loads(CONFORMANCE.read_text(encoding="utf-8"))["rows"]
    equal = [x for x in rows if x["dtype"] == "float32" and x["outcome"] == "equal"]
    return [x["target"] for x in equal]


# -------------------------------------------------------------------- graphs, from here


def record(folder: Path, names: Iterable[str]) -> None:
    """Run the course of each optimizer, and dump each graph into a folder of its name.

    The file `done` in it shows that the bits were equal to the end.
    """
    from fuseopt import compile
    from fuseopt.conformance import verify
    from tests.tools.conformance import work

    into = folder

    def compiled(optimizer: Any) -> Any:
        given = {"eager_if_faster": False, "fallback": "eager"}
        return compile(optimizer, dump_dir=str(into), **given).step

    verify.compiled = compiled
    for target in names:
        into = folder_of(target, folder)
        shutil.rmtree(into, ignore_errors=True)
        module, _, name = target.partition(":")
        try:
            found = work(module, name, "float32")
        except Exception as error:
            found = {"outcome": "raises", "reason": f"{type(error).__name__}: {error}"}
        if found["outcome"] == "equal":
            (into / "done").touch()
        else:
            print(f"{target} was not recorded: {found['outcome']}, {found['reason']}")


def record_all(names: Iterable[str], folder: Path) -> None:
    """Record what the folder lacks, in processes of a few optimizers each."""
    left = [x for x in names if not is_recorded(x, folder)]
    for k in range(0, len(left), TOGETHER):
        command = [sys.executable, "-m", "tests.tools.kernels_aarch64", "--record"]
        subprocess.run(
            [*command, str(folder), *left[k : k + TOGETHER]],
            cwd=ROOT,
            env={**os.environ, "KINETO_LOG_LEVEL": "6", "OMP_NUM_THREADS": "1"},
        )


def folder_of(target: str, folder: Path) -> Path:
    """Return the folder with the graphs of an optimizer."""
    return folder / target.replace(":", ".")


def is_recorded(target: str, folder: Path) -> bool:
    """Did the optimizer run its course here?"""
    return (folder_of(target, folder) / "done").exists()


# ------------------------------------------------------------- kernels, in the emulator


def judge(folder: Path) -> dict[str, Any]:
    """Compare the kernels of all graphs of an optimizer with the reference.

    `worst`: the largest difference of a graph with sums, relative to the largest number
    of its tensor. `skipped`: graphs with ATen calls between their kernels.
    """
    from fuseopt.compiler import again, alone
    from fuseopt.scheduler import schedule

    found: dict[str, Any] = {"graphs": 0, "kernels": 0, "skipped": [], "worst": 0.0}
    outcome = "equal"
    for path in sorted(folder.glob("step*")):
        saved = again.loaded(path)
        plan = schedule(saved.graph, lambda *_: None, saved.machine)
        refusal = alone.why_not(saved.graph, plan)
        if refusal:
            found["skipped"].append(refusal)
            continue
        result = alone.compare_with_reference(saved, plan)
        found["graphs"] += 1
        found["kernels"] += len(plan.kernels)
        if not result.exact:
            # made-up numbers may overflow
            worst = result.worst if math.isfinite(result.worst) else 0.0
            found["worst"] = max(found["worst"], worst)
            near = "another order of sums"
            outcome = "differs" if not result.right or outcome == "differs" else near
    if not found["graphs"]:
        outcome = "not run"
    return {"outcome": outcome, **found}


def worker(folder: Path, names: Iterable[str]) -> None:
    """Print one line of JSON for each optimizer."""
    for name in names:
        try:
            row = judge(folder_of(name, folder))
        except Exception as error:
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            row = {"outcome": "raises", "reason": text}
        print(json.dumps({"target": name, **row}), flush=True)


def emulated(folder: Path, names: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the outcome of each optimizer, from one process in the emulator."""
    command = aarch64.command("-m", "tests.tools.kernels_aarch64", "--worker")
    child = subprocess.Popen(
        [*command, str(folder), *names],
        cwd=ROOT,
        env=aarch64.environment(ROOT),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    if child.wait():
        sys.exit(f"the emulated process ended with {child.returncode}")


def main() -> None:
    """Record, judge what the record lacks, and write each outcome at once."""
    words = sys.argv[1:]
    if words[:1] == ["--record"]:
        record(Path(words[1]), words[2:])
        return
    if words[:1] == ["--worker"]:
        worker(Path(words[1]), words[2:])
        return
    if aarch64.missing():
        sys.exit(aarch64.missing())
    folder = Path(words[0]).absolute()
    known = {x["target"] for x in read_record().get("kernels", [])}
    names = [x for x in words[1:] or targets() if x not in known]
    record_all(names, folder)
    there = [x for x in names if is_recorded(x, folder)]
    for row in emulated(folder, there):
        print(row, flush=True)
        record_now = read_record()
        rows = [
            x for x in record_now.get("kernels", []) if x["target"] != row["target"]
        ]
        rows = sorted([*rows, row], key=lambda x: x["target"].lower())
        write_record({**record_now, "kernels": rows})


if __name__ == "__main__":
    main()
