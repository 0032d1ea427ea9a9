"""Out: what figures depend on: processor, versions, threads. Never a host's name."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
#: What can change a figure: the package, and what measures it.
CODE = ("fuseopt/**/*.py", "bench/*.py")
#: Files of bench/ that only choose what is measured, or read the figures.
READERS = (
    "plan.py conftest.py report.py pictures.py compare.py tables.py __main__.py"
).split()

Environment = dict[str, str | int]


def environment(device: str = "cpu") -> Environment:
    """Return what a figure measured now, on this device, depends on."""
    found: Environment = {
        "device": device,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "vector_unit": torch.backends.cpu.get_cpu_capability(),
        "compiler": compiler(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "fuseopt": version("fuseopt"),
    }
    if device != "cpu":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30)
        found["gpu_toolkit"] = torch.version.cuda or torch.version.hip or "none"
    return found


def today() -> str:
    """Return the date, as in 2026-11-21."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def version(package: str) -> str:
    """Return the version of a package that is installed, or "none"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def processor() -> str:
    """Return the model of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def compiler() -> str:
    """Return the first line that the C++ compiler says of itself, or "none"."""
    command = os.environ.get("CXX") or "g++"
    try:
        done = subprocess.run(
            [*shlex.split(command), "--version"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return "none"
    return done.stdout.split("\n", 1)[0]


def code_version(root: Path = ROOT) -> str:
    """Return a hash of the code whose figures these are; readers of figures not in."""
    files = sorted(path for pattern in CODE for path in root.glob(pattern))
    readers = {path for name in READERS for path in (root / "bench").glob(name)}
    content = hashlib.sha256()
    for path in files:
        if path not in readers:
            content.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return content.hexdigest()[:12]


def file_name(found: Environment) -> str:
    """Return the name of the results file: one for each machine and torch version."""
    machine = found.get("gpu", f"{found['processor']} {found['threads']} threads")
    words = re.sub(r"[^a-z0-9]+", "-", str(machine).lower()).strip("-")
    return f"{words}-torch-{found['torch']}.json"
