"""In: a way to compile, the name of a model. Out: the seconds of a first step.

The measuring process, and what talks to it. Every first step has a process of its own:
nothing that an earlier one left in memory, here or in torch, may make it look sooner.
The process imports everything and compiles something else, says "ready", and waits;
so neither imports nor the start of an interpreter are part of the figure.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

READY = "ready"
WAYS = ("fuseopt.compile", "backend", "inductor")


class TooLong(Exception):
    """The first step was not done in time."""


class Process:
    """A process that stands ready to do one first step."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        if self._answer(600) != READY:
            raise RuntimeError("the measuring process did not get ready; see stderr")

    def first_step(self, cap: float = 600) -> dict[str, Any]:
        """Let it do the step; return its figures (see `measure`). Raises TooLong."""
        print("go", file=self._child.stdin, flush=True)
        if not (figures := self._answer(cap)):
            raise RuntimeError("the measuring process failed; see stderr")
        return json.loads(figures)

    def _answer(self, cap: float) -> str:
        assert self._child.stdout is not None
        if not select.select([self._child.stdout], [], [], cap)[0]:
            raise TooLong(f"not finished in {cap:g} s")
        return self._child.stdout.readline().strip()


@contextmanager
def process(way: str, model: str, cache: Path, device: str) -> Iterator[Process]:
    """Start a measuring process whose caches are in this folder; end it after use."""
    caches = {
        "FUSEOPT_CACHE_DIR": str(cache / "fuseopt"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }
    with subprocess.Popen(
        (sys.executable, "-m", "bench.first_step", way, model, device),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **caches},
        cwd=Path(__file__).parent.parent,
    ) as child:
        try:
            yield Process(child)
        finally:
            child.kill()


def measure(way: str, model: str, device: str = "cpu") -> dict[str, Any]:
    """Compile and do one AdamW step; return the seconds in all and of each part.

    Over small parameters AdamW is made as users make it, with torch's default form for
    the device; over a model's in the form of lists, which all compilers take best.
    `dynamo_seconds` is what is left when fuseopt's own time is taken away: Dynamo's
    trace and guards, and the step itself, which is microseconds at this size. Inductor
    tells no times of its own; then only `first_step_seconds` is known.
    """
    import fuseopt
    from bench.counting import count_compiled
    from bench.models import SMALL, make_params, model_shapes

    params = make_params(model_shapes(model), device=device)
    optimizer = torch.optim.AdamW(
        params, foreach=None if SMALL.fullmatch(model) else True
    )
    if way == "fuseopt.compile":
        step = fuseopt.compile(optimizer).step
    else:
        backend = "fuseopt" if way == "backend" else way
        step = torch.compile(optimizer.step, backend=backend)
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    begin = time.perf_counter()
    step()
    if device != "cpu":
        torch.cuda.synchronize()
    figures: dict[str, Any] = {"first_step_seconds": time.perf_counter() - begin}
    figures["graph_breaks"] = sum(breaks.values())
    if way != "inductor":
        figures |= count_compiled(fuseopt.reports(), figures["graph_breaks"])
        figures["dynamo_seconds"] = (
            figures["first_step_seconds"] - figures["backend_seconds"]
        )
    return figures


def prepare(way: str, device: str) -> dict[str, Any]:
    """Do what the first compilation of any function in a process has to do once.

    Returns the figures of imports, none of which is part of the first step's:
    `import_seconds`, what `import fuseopt` and loading the entry point take above
    `import torch`, which this process has done and nothing more; `late_import_seconds`,
    what is imported when Dynamo, which is there by then, compiles for the backend;
    `imports_inductor`, whether any of it imported Inductor's compiler.
    """
    (entry,) = entry_points(group="torch_dynamo_backends", name="fuseopt")
    begin = time.perf_counter()
    fuseopt = importlib.import_module("fuseopt")
    entry.load()
    found: dict[str, Any] = {"import_seconds": time.perf_counter() - begin}
    importlib.import_module("torch._dynamo")  # as whoever calls torch.compile does
    begin = time.perf_counter()
    if way == "fuseopt.compile":
        fuseopt.compile  # noqa: B018
    entry.load()  # as torch.compile does
    importlib.import_module("fuseopt.compiler.diagnostics")
    importlib.import_module("fuseopt.compiler.dispatch")
    found["late_import_seconds"] = time.perf_counter() - begin
    found["imports_inductor"] = "torch._inductor.compile_fx" in sys.modules
    from bench.models import make_params

    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    torch._dynamo.lookup_backend("inductor" if way == "inductor" else "fuseopt")
    # Makes the thread pool, and imports what the first eager step imports.
    torch.optim.AdamW(make_params([(8,)] * 3, device=device)).step()
    return found


def main() -> None:
    """Get ready, wait for a line on stdin, measure, print the figures as JSON."""
    parser = argparse.ArgumentParser(description="seconds of a first compiled step")
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("model", help="as in bench/models.py; 300x8: 300 small ones")
    parser.add_argument("device", nargs="?", default="cpu")
    options = parser.parse_args()
    found = prepare(options.way, options.device)
    print(READY, flush=True)
    sys.stdin.readline()
    print(json.dumps(found | measure(options.way, options.model, options.device)))


if __name__ == "__main__":
    main()
