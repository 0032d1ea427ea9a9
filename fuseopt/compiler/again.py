"""Save a captured graph in a file, and generate its kernels again without the model.

`save` writes two files. `graph.pickle` has the graph, the scheduler's Machine, and the
target of each kernel. `repro.py` schedules and generates again, and compares the result
with the sources in the same folder. So a kernel can be examined, or sent with a bug
report, without the model and its data.
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
    """The contents of `graph.pickle`."""

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
    script = TEXT.format(graph=GRAPH, version=version, script=SCRIPT)
    (folder / SCRIPT).write_text(script, encoding="utf-8")


def texts(saved: Saved) -> dict[str, tuple[str, str]]:
    """Return the file suffix and the text of each kernel, by name."""
    plan = schedule(saved.graph, lambda *_: None, saved.machine)
    texts_by_kernel = {}
    for kernel in plan.kernels:
        target = saved.targets[kernel.name]
        texts_by_kernel[kernel.name] = target.suffix, target.render(kernel).text
    return texts_by_kernel


def loaded(folder: Path) -> Saved:
    """Load the graph of a folder that you trust: a pickle may run any code."""
    saved: Saved = pickle.loads((folder / GRAPH).read_bytes())
    return saved


def compare(folder: Path, saved: Saved) -> int:
    """Compare a folder's kernels with those generated from its graph now.

    Returns 1 if a text differs, else 0.
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
