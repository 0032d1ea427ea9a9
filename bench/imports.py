"""In: nothing. Out: milliseconds that importing fuseopt takes beside torch.

    python -m bench.imports --rounds 10

Each import is timed in a process of its own, after torch and the parts of torch that
`torch.compile` loads: what is left is fuseopt's. One line of JSON: the median and the
least of the rounds, and how many modules were loaded that are not torch's. Bytecode is
there, as pip leaves it at an installation: a first round writes it, and does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

#: What is timed, by name.
IMPORTED = {
    "import fuseopt": "import fuseopt",
    "the backend": "import fuseopt.backend",
    "fuseopt.compile": "import fuseopt; fuseopt.compile",
    "compile, tail, explain": (
        "import fuseopt; fuseopt.compile, fuseopt.tail, fuseopt.explain"
    ),
}
CODE = """
import json, sys, time
import torch, torch._dynamo, torch._dynamo.backends.registry, torch.fx
import torch._dynamo.variables.optimizer, torch.fx.experimental.symbolic_shapes
before = {*sys.modules}
begin = time.perf_counter()
IMPORTED
took = 1e3 * (time.perf_counter() - begin)
roots = [x.partition(".")[0] for x in {*sys.modules} - before]
print(json.dumps({"ms": took, "modules": sum(x != "torch" for x in roots)}))
"""


def measured(name: str, rounds: int, bytecode: str) -> dict[str, Any]:
    """The figures of one import; `bytecode`: the folder that has the bytecode."""
    found = []
    own = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode}
    own.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CODE.replace("IMPORTED", IMPORTED[name])]
    for _ in range(rounds + 1):
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout))
    took = [x["ms"] for x in found[1:]]
    return {
        "imported": name,
        "median_ms": round(statistics.median(took), 2),
        "least_ms": round(min(took), 2),
        "modules": found[-1]["modules"],
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each import."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as bytecode:
        for name in IMPORTED:
            print(json.dumps(measured(name, given.rounds, bytecode)), flush=True)


if __name__ == "__main__":
    main()
