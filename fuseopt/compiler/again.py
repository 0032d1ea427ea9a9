"""A captured graph in a file -> the text of its kernels, again and without the model.

`save` writes `graph.pickle`, which has the graph, what the scheduler knows of the
machine, and each kernel's target; and `repro.py`, which schedules and
generates anew, and compares with the sources that lie beside it. So a kernel can be
looked into, or handed on in a report of a fault, where the model and its data are not.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..codegen import Target
from ..ir.graph import Graph
from ..scheduler import Machine, schedule

GRAPH, SCRIPT = "graph.pickle", "repro.py"
TEXT = '''"""Schedules {graph} and generates its kernels again; are they those here?

Needs fuseopt {version} and nothing of the model: python {script}
With --run, they also run on made-up numbers, beside the reference, and are timed.
The file of the graph is a pickle: run what you have made, or trust.
"""

import sys
from pathlib import Path

from fuseopt.compiler.alone import main

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent, sys.argv[1:]))
'''


class Saved(NamedTuple):
    """What a graph is compiled again from."""

    version: str
    graph: Graph
    machine: Machine
    targets: dict[str, Target]


def save(
    folder: Path,
    version: str,
    graph: Graph,
    machine: Machine,
    targets: Mapping[str, Target],
) -> None:
    """Write both files. `version`: fuseopt's. Raises OSError."""
    saved = Saved(version, graph, machine, dict(targets))
    (folder / GRAPH).write_bytes(pickle.dumps(saved))
    told = TEXT.format(graph=GRAPH, version=version, script=SCRIPT)
    (folder / SCRIPT).write_text(told, encoding="utf-8")


def texts(saved: Saved) -> dict[str, tuple[str, str]]:
    """By kernel, its file's suffix and its text."""
    plan = schedule(saved.graph, lambda *_: None, saved.machine)
    found = {}
    for kernel in plan.kernels:
        target = saved.targets[kernel.name]
        found[kernel.name] = target.suffix, target.render(kernel).text
    return found


def loaded(folder: Path) -> Saved:
    """What was saved there. Only for folders that you trust: a pickle may hold any
    code.
    """
    saved: Saved = pickle.loads((folder / GRAPH).read_bytes())
    return saved


def compare(folder: Path, saved: Saved) -> int:
    """Compare a folder's kernels with those that its graph gives now; 1 if any
    differs.
    """
    differ = False
    for name, (suffix, text) in texts(saved).items():
        path = folder / f"{name}{suffix}"
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if before == text:
            print(f"{path.name}: the same text")
            continue
        differ = True
        lines = itertools.zip_longest(before.splitlines(), text.splitlines())
        number, (old, new) = next(
            ((k, pair) for k, pair in enumerate(lines, 1) if pair[0] != pair[1]),
            (1 + text.count("\n"), ("", "")),
        )
        print(f"{path.name}: line {number} was {old!r}, and is {new!r}")
    if differ:
        print(f"the graph was captured by fuseopt {saved.version}")
    return int(differ)
