"""In: so many copies of a model's DTensors, so many processes. Out: docs/shards.md's
table of what one of these processes pays for AdamW's step and the clip.

    python -m bench.scale

Each case is measured in a process of its own, as the last process of a group whose
others do not exist. Rows lie as they do in the model, so that parts are uneven where
its are; columns are cut to COLUMNS, so that the arithmetic takes next to no time and
that eight processes' parts fit into one machine. Bytes are those of the whole model.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import profile

from bench.environment import processor
from bench.models import model_shapes
from bench.results import Figures
from bench.tables import table

MODEL = "llama2-7b"
#: Copies of the model, and processes.
CASES = ((1, 8), (1, 64), (1, 1024), (4, 64))
COLUMNS = 1
ROUNDS = 30
PAGE = Path(__file__).parent.parent / "docs" / "shards.md"
BLOCK = re.compile("<!-- scale:begin -->.*?<!-- scale:end -->", re.DOTALL)


def sent(calls: Sequence[Callable[[], object]]) -> list[int]:
    """The float32s that this process has for each collective of some calls."""
    with profile(record_shapes=True) as seen:
        for call in calls:
            call()
    return [
        math.prod(event.input_shapes[0])
        for event in seen.function_events
        if event.name.startswith("_c10d_functional::") and "wait" not in event.name
    ]


def measured(shapes: Sequence[tuple[int, ...]], world: int) -> Figures:
    """One case, as this process: nothing else may have a group in it."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import fuseopt

    torch._dynamo.reset()
    # what a call costs the host, without threads that wait for one another
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=world - 1, world_size=world)
    try:
        plain, ours = (parameters(shapes, world) for _ in range(2))
        eager = torch.optim.AdamW(plain, foreach=True)
        own = fuseopt.compile(torch.optim.AdamW(ours), fallback="error")
        steps = [own.step, lambda: fuseopt.clip_grad_norm_(ours, 1.0)]
        firsts, reports = [], []
        for call in steps:
            begin = time.perf_counter()
            call()
            firsts.append(time.perf_counter() - begin)
            reports.append(fuseopt.reports()[-1])
        collectives = sent(steps)
        clip = torch.nn.utils.clip_grad_norm_
        calls = [eager.step, lambda: clip(plain, 1.0), *steps]
        taken = [least(call) for call in calls]
        step, norm = reports
        return {
            "tensors": len(shapes),
            "world": world,
            "collectives": len(collectives),
            "collective_bytes": 4 * sum(collectives),
            "launches": [step.launches, norm.launches],
            "bytes": here(shapes, world) * step.kernels[0].bytes_per_element,
            "plan": sum(r.backend_seconds - r.build_seconds for r in reports),
            "first": sum(firsts),
            "microseconds": [1e6 * x for x in taken],
        }
    finally:
        dist.destroy_process_group()


def parameters(shapes: Sequence[tuple[int, ...]], world: int) -> list[Any]:
    """DTensors, by rows, with gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    found = []
    for rows, *rest in shapes:
        columns = [min(n, COLUMNS) for n in rest]
        size = {"shape": (rows, *columns), "stride": (*columns, 1)}
        part = torch.ones(rows_here(rows, world), *columns)
        p, g = (
            DTensor.from_local(x, mesh, [Shard(0)], run_check=False, **size)
            for x in (part, torch.ones_like(part))
        )
        found.append(torch.nn.Parameter(p))
        found[-1].grad = g
    return found


def rows_here(rows: int, world: int) -> int:
    """Of so many rows, how many has the last process?"""
    each = -(-rows // world)
    return max(0, rows - each * (world - 1))


def here(shapes: Sequence[tuple[int, ...]], world: int) -> int:
    """How many elements of the model has the last process?"""
    return sum(rows_here(rows, world) * math.prod(rest) for rows, *rest in shapes)


def least(call: Callable[[], object]) -> float:
    """Seconds of the calling thread, the least of many calls."""
    call()
    taken = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        call()
        taken.append(time.thread_time() - begin)
    return min(taken)


def page(found: Sequence[Figures]) -> str:
    """What stands between the marks of the page."""
    header = ["DTensors", "processes", "MB of memory a step", "launches", "collectives"]
    header += ["bytes sent", "step, µs", "eager foreach", "clip, µs", "torch's"]
    rows = []
    for x in found:
        eager, torchs, step, clip = (f"{n:,.0f}" for n in x["microseconds"])
        launches = " and ".join(map(str, x["launches"]))
        row = [f"{x['tensors']:,}", f"{x['world']:,}", f"{x['bytes'] / 1e6:,.0f}"]
        row += [launches, str(x["collectives"]), str(x["collective_bytes"])]
        row += [step, eager, clip, torchs, f"{x['plan']:.2f}", f"{x['first']:.1f}"]
        rows.append(row)
    header += ["plans, s", "first calls, s"]
    told = f"{processor()}, torch {torch.__version__}; again: `python -m bench.scale`."
    return f"<!-- scale:begin -->\n{table(header, rows)}\n{told}\n<!-- scale:end -->"


def main(arguments: Sequence[str]) -> None:
    """Measure one case and print it, or all and write the page."""
    shapes = [*map(tuple, model_shapes(MODEL))]
    if arguments:
        copies, world = map(int, arguments)
        print(json.dumps(measured(shapes * copies, world)))
        return
    found = []
    for case in CASES:
        command = [sys.executable, "-m", "bench.scale", *map(str, case)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: page(found), text), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
