"""NVIDIA's own tools over a small case each: compute-sanitizer and ncu.

A tool is looked for in PATH and where CUDA is installed; one that is not there is
reported as not run.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.gpu.place import Place
from bench.results import Figures

ALONE = True
CAP = 150.0
ROOT = Path(__file__).parent.parent.parent
METRICS = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "dram__bytes.sum": "dram_bytes",
    "gpu__time_duration.sum": "duration",
    "launch__registers_per_thread": "registers",
}
#: One step of an optimizer, for a tool to watch: argv is its dtype and its size.
SCRIPT = """
import sys, torch, fuseopt
dtype, count, device = getattr(torch, sys.argv[1]), int(sys.argv[2]), sys.argv[3]
sizes = [(count,), (count // 2 + 3,), (17, 5), (), (3,)]
params = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]
for p in params:
    p.grad = torch.randn_like(p)
options = {"cudagraphs": False} if "cudagraphs" in fuseopt_options else {}
opt = fuseopt.compile(torch.optim.AdamW(params, foreach=True), **options)
for _ in range(4):
    opt.step()
if device != "cpu":
    torch.get_device_module(device).synchronize()
print("done")
"""
OPTIONS = """
import dataclasses
from fuseopt.config import Config
fuseopt_options = {f.name for f in dataclasses.fields(Config)}
"""


class NotRun(Exception):
    """The tool is not here; the message says where it was looked for."""


def cases(place: Place) -> list[dict[str, Any]]:
    """memcheck and racecheck of a small step; a profile of a large one."""
    return [
        {"name": "memcheck", "weight": 1},
        {"name": "racecheck", "weight": 1},
        {"name": "ncu fp32", "weight": 1},
        {"name": "ncu bf16", "weight": 1},
    ]


def find(name: str) -> str:
    """The path of a tool. Raises NotRun."""
    homes = [
        os.environ.get("CUDA_HOME"),
        os.environ.get("CUDA_PATH"),
        "/usr/local/cuda",
    ]
    places = [
        Path(h) / part for h in homes if h for part in ("bin", "compute-sanitizer")
    ]
    places += sorted(Path("/opt/nvidia/nsight-compute").glob("*"))
    for folder in (None, *places):
        found = shutil.which(name, path=str(folder) if folder else None)
        if found:
            return found
    raise NotRun(f"not run: no {name} in PATH or in {', '.join(map(str, places))}")


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """The tool's run; one that is missing gives a figure that says so."""
    kind, _, dtype = case["name"].partition(" ")
    try:
        path = find("ncu" if kind == "ncu" else "compute-sanitizer")
    except NotRun as why:
        text = str(why)
        return lambda: {"not_run": text}
    if kind == "ncu":
        return lambda: _ncu(path, "bfloat16" if dtype == "bf16" else "float32", place)
    return lambda: _sanitizer(path, kind, place)


#: What tools say where the machine does not let them watch a device.
REFUSED = (
    "Device not supported",
    "LibraryNotLoaded",
    "ERR_NVGPUCTRPERM",
    "Unable to attach",
    "not supported on this device",
)


def refused(text: str) -> Figures | None:
    """The figure that says that a tool may not run here; None if that is not why."""
    found = next((line for line in text.splitlines() for r in REFUSED if r in line), "")
    return {"not_run": f"not run: {found.strip()[:260]}"} if found else None


def _run(
    command: list[str], dtype: str, count: int, place: Place
) -> subprocess.CompletedProcess[str]:
    script = OPTIONS + SCRIPT
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [*command, sys.executable, "-c", script, dtype, str(count), place.device],
        capture_output=True,
        text=True,
        timeout=CAP - 10,
        cwd=ROOT,
        env=environment,
        check=False,
    )


def _sanitizer(path: str, tool: str, place: Place) -> Figures:
    done = _run([path, "--tool", tool, "--print-limit", "5"], "bfloat16", 4099, place)
    text = done.stdout + done.stderr
    found = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if found is None or "done" not in text:
        if (why := refused(text)) is not None:
            return why
        raise RuntimeError(f"{tool} gave no summary (exit {done.returncode}): "
                           f"{text[-600:]}")  # fmt: skip
    errors = int(found[1])
    if errors:
        raise AssertionError(f"{tool} found {errors} errors: {text[:900]}")
    return {"errors": errors}


def _ncu(path: str, dtype: str, place: Place) -> Figures:
    command = [path, "--csv", "--clock-control", "none", "--metrics"]
    command += [",".join(METRICS), "-k", "regex:fuseopt", "-s", "2", "-c", "1"]
    done = _run(command, dtype, 4096 if place.tiny else 2**27, place)
    text = done.stdout + done.stderr
    why = None if '"ID"' in text else refused(text)
    return read_ncu(text) if why is None else why


def read_ncu(text: str) -> Figures:
    """The metrics of a profile's CSV. Raises RuntimeError with what it said instead."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        raise RuntimeError(f"ncu gave no table: {text[-600:]}")
    found: Figures = {}
    for row in csv.DictReader(lines[heads[0] :]):
        name = row.get("Metric Name")
        if name in METRICS:
            value = str(row["Metric Value"]).replace(",", "")
            found[METRICS[name]] = f"{value} {row['Metric Unit']}".strip()
            found["kernel"] = row["Kernel Name"]
    return found


def summary(done: dict[str, Figures]) -> list[str]:
    """What each tool said."""
    lines = []
    for name, f in done.items():
        rest = {k: v for k, v in f.items() if k not in ("seconds", "trace")}
        lines.append(f"{name:10} {json.dumps(rest)[:260]}")
    return lines
