"""In: a backend, a number of parameters. Out: the seconds of a first compiled step.

The measuring process, and what talks to it. Every first step has a process of its own:
nothing that an earlier one left in memory, here or in torch, may make it look sooner.
The process imports everything and compiles something else, says "ready", and waits;
so neither imports nor the start of an interpreter are part of the figure.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bench.shapes import make_params, small_shapes

READY = "ready"


class Process:
    """A process that stands ready to do one first step."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self._child = child
        if self._answer() != READY:
            raise RuntimeError("the measuring process did not get ready; see stderr")

    def first_step(self) -> dict[str, float]:
        """Let it do the step; return its figures (see `measure`)."""
        print("go", file=self._child.stdin, flush=True)
        if not (figures := self._answer()):
            raise RuntimeError("the measuring process failed; see stderr")
        return json.loads(figures)

    def _answer(self) -> str:
        return self._child.stdout.readline().strip() if self._child.stdout else ""


@contextmanager
def process(backend: str, params: int, cache: Path) -> Iterator[Process]:
    """Start a measuring process whose kernel cache is this folder; end it after use."""
    with subprocess.Popen(
        (sys.executable, "-m", "bench.first_step", backend, str(params)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FUSEOPT_CACHE_DIR": str(cache)},
        cwd=Path(__file__).parent.parent,
    ) as child:
        try:
            yield Process(child)
        finally:
            child.kill()


def measure(backend: str, count: int) -> dict[str, float]:
    """Compile and do one AdamW step; return the seconds in all and of each part.

    `dynamo_seconds` is what is left when fuseopt's own time is taken away: Dynamo's
    trace and guards, and the step itself, which is microseconds at this size. Other
    backends tell no times of their own; then only `first_step_seconds` is known.
    """
    optimizer = torch.optim.AdamW(make_params(small_shapes(count)))
    step = torch.compile(optimizer.step, backend=backend)
    begin = time.perf_counter()
    step()
    figures = {"first_step_seconds": time.perf_counter() - begin}
    if backend == "fuseopt":
        import fuseopt

        (report,) = fuseopt.reports()
        figures["backend_seconds"] = report.backend_seconds
        figures["build_seconds"] = report.build_seconds
        figures["dynamo_seconds"] = (
            figures["first_step_seconds"] - report.backend_seconds
        )
    return figures


def prepare(backend: str) -> None:
    """Do what the first compilation of any function in a process has to do once."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    torch._dynamo.lookup_backend(backend)
    # Makes the thread pool, and imports what the first eager step imports.
    torch.optim.AdamW(make_params(small_shapes(3))).step()


def main() -> None:
    """Get ready, wait for a line on stdin, measure, print the figures as JSON."""
    parser = argparse.ArgumentParser(description="seconds of a first compiled step")
    parser.add_argument("backend")
    parser.add_argument("params", type=int)
    options = parser.parse_args()
    prepare(options.backend)
    print(READY, flush=True)
    sys.stdin.readline()
    print(json.dumps(measure(options.backend, options.params)))


if __name__ == "__main__":
    main()
