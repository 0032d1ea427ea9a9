"""What the figures depend on: GPU, driver, clocks, versions. The first section.

Its one case also compiles and runs a kernel, so that a machine on which nothing works
says why at once.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment, version
from bench.gpu.place import Place
from bench.results import Figures

ALONE = False
CAP = 120.0
ASKED = (
    "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,"
    "clocks.max.mem,power.limit,temperature.gpu,compute_cap"
)


def cases(place: Place) -> list[dict[str, Any]]:
    """One."""
    return [{"name": "environment", "weight": 1}]


def prepare(case: dict[str, Any], place: Place) -> Callable[[], Figures]:
    """What is found out."""
    return lambda: found(place)


def found(place: Place) -> Figures:
    """The environment, and that a first step runs."""
    figures: Figures = dict(environment("cuda" if place.name == "cuda" else "cpu"))
    figures["device"] = place.device
    figures["cuda"] = torch.version.cuda or "none"
    for package in ("timm", "transformers", "numpy"):
        figures[package] = version(package)
    figures["nvidia_smi"] = _said(
        ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"]
    )
    figures["ptxas"] = _ptxas()
    figures["nvcc"] = _said(["nvcc", "--version"])
    if place.name == "cuda":
        p = torch.cuda.get_device_properties(0)
        figures["multiprocessors"] = p.multi_processor_count
        figures["l2_bytes"] = getattr(p, "L2_cache_size", None)
        figures["capability"] = list(torch.cuda.get_device_capability())
    return {**figures, **_first_step(place)}


def _first_step(place: Place) -> Figures:
    import fuseopt

    p = torch.ones(100, device=place.device, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = fuseopt.compile(
        torch.optim.SGD([p], lr=0.5, foreach=True), **place.options(fallback="error")
    )
    optimizer.step()
    place.synchronize()
    if p.tolist() != [0.5] * 100:
        raise AssertionError(f"a first step gave {p[:4].tolist()}")
    (report,) = fuseopt.reports()
    return {
        "first_target": report.kernels[0].target,
        "first_report": str(report)[:2000],
    }


def _said(command: list[str]) -> str:
    """What a command says; "none" where it is not there."""
    if shutil.which(command[0]) is None:
        return "none"
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=30, check=False
    )
    return (done.stdout + done.stderr).strip()[-500:]


def _ptxas() -> str:
    """The version of the assembler that Triton uses."""
    try:
        import triton

        folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
        return _said([str(folder / "ptxas"), "--version"])
    except (ImportError, OSError) as error:
        return f"none: {error}"


def summary(done: dict[str, Figures]) -> list[str]:
    """GPU, driver, versions."""
    lines = []
    for f in done.values():
        if "failed" in f:
            lines.append(f"FAILED {f['failed'][:600]}")
            continue
        lines.append(
            f"{f.get('gpu', f['processor'])}, torch {f['torch']}, "
            f"triton {f['triton']}, CUDA {f['cuda']}, Python {f['python']}"
        )
        lines.append(f["nvidia_smi"].split("\n")[-1])
    return lines
