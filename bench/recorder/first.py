"""Seconds of a first step, recorded and as today, in turns, each in its own process.

Wall, thread and process seconds are given, since other processes may use the machine.
Cold: an empty cache of kernels. Warm: the same step was compiled by another process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from typing import Any

WAYS = ("recorder", "today")


def measure(way: str, name: str, lanes: int) -> dict[str, Any]:
    """The first three steps of one optimizer, in this process."""
    import torch

    import fuseopt
    from bench.first_step import prepare

    from .coverage import optimizers
    from .way import recorded

    make = dict(optimizers())[name]
    prepare("fuseopt.compile", "cpu")
    params = [torch.nn.Parameter(torch.randn(8)) for _ in range(lanes)]
    optimizer = make(params)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    found: dict[str, Any] = {"wall": [], "thread": [], "cpu": []}
    with recorded() if way == "recorder" else nullcontext([]) as every:
        fuseopt.compile(optimizer)
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(8)
            clocks = time.perf_counter, time.thread_time, time.process_time
            begin = [clock() for clock in clocks]
            optimizer.step()
            for key, clock, before in zip(found, clocks, begin, strict=True):
                found[key].append(round(clock() - before, 3))
        if every:
            step = every[-1].recorder
            found["why"] = step.why
            found["parts"] = [x.seconds for x in step.programs]
    told = fuseopt.reports()[-1]
    found["launches"] = told.launches
    found["build"] = round((told.seconds or {}).get("build", 0), 3)
    return found


def main() -> None:
    """Measure in turns, and print a line of JSON for each process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--lanes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--way", choices=WAYS)
    given = parser.parse_args()
    if given.way:
        print(json.dumps(measure(given.way, given.names[0], given.lanes)))
        return
    for name in given.names:
        for turn in range(given.turns):
            for way in WAYS:
                with tempfile.TemporaryDirectory() as cache:
                    for heat in ("cold", "warm"):
                        command = [sys.executable, "-W", "ignore", "-m", __spec__.name]
                        command += [name, "--way", way, "--lanes", str(given.lanes)]
                        done = subprocess.run(
                            command,
                            env={**os.environ, "FUSEOPT_CACHE_DIR": cache},
                            capture_output=True,
                            text=True,
                        )
                        line = done.stdout.strip() or json.dumps(done.stderr[-300:])
                        print(
                            f'["{name}", "{way}", "{heat}", {turn}, {line}]', flush=True
                        )


if __name__ == "__main__":
    main()
