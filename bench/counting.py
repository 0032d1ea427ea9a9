"""In: a step. Out: exact counts of it: launches, builds, bytes of source, memory.

Counts do not depend on how busy the machine is, so that two result files must agree on
them where the code is the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.results import Figures
from tests.frames import lines

if TYPE_CHECKING:
    from fuseopt import Report


def lines_of(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs, in this thread."""
    return lines(call).total()


def count_compiled(reports: Sequence[Report], graph_breaks: int) -> Figures:
    """Return what fuseopt's reports say of a step: counts, and seconds by pass.

    A step without a graph break runs the last graph that was made of it; one with
    breaks runs several, of which all are counted.
    """
    running = reports if graph_breaks else reports[-1:]
    passes: dict[str, float] = {}
    for report in reports:
        for name, seconds in report.seconds.items():
            passes[name] = passes.get(name, 0.0) + seconds
    fallbacks = [report.fallback for report in reports if report.fallback]
    return {
        "launches": sum(report.launches for report in running),
        "externs": sum(len(report.externs) for report in running),
        "graphs": len(reports),
        "builds": sum(report.builds for report in reports),
        "bytes": sum(report.bytes for report in running),
        "source_bytes": sum(
            len(kernel.source) for report in running for kernel in report.kernels
        ),
        "backend_seconds": sum(report.backend_seconds for report in reports),
        "build_seconds": sum(report.build_seconds for report in reports),
        "passes": passes,
        **({"fallback": fallbacks} if fallbacks else {}),
    }


class _Calls(TorchDispatchMode):
    """Counts ATen calls; one with lists counts once for each tensor of the first, as
    on a CPU each has a loop of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        self.count += len(first) if isinstance(first, (list, tuple)) else 1
        return func(*args, **(kwargs or {}))


def count_eager(call: Callable[[], object]) -> tuple[int, int | None]:
    """Return how many loops over a tensor one eager call makes on a CPU, and the peak
    of its memory: a slow step is called once for both.
    """
    with _Calls() as calls:
        peak = peak_bytes(call)
    return calls.count, peak


def count_on_gpu(call: Callable[[], object]) -> int:
    """Return how many kernels the GPU ran for one call, also in a CUDA graph."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        call()
        torch.cuda.synchronize()
    return sum(
        event.device_type == DeviceType.CUDA
        and not event.name.startswith(("Memcpy", "Memset"))
        for event in recorded.events()
    )


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int | None:
    """Return how much more memory than before it one call had at its worst.

    None where the system does not tell. On a CPU it is that of the whole process, in
    pages, so that less than a MiB means nothing.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(device) - before
    found = _resident(call)
    return None if found is None else max(0, found[1] - found[0])


def peak_resident(call: Callable[[], object]) -> int | None:
    """Return the most memory that the process had in one call, all of it, or None."""
    found = _resident(call)
    return None if found is None else found[1]


def _resident(call: Callable[[], object]) -> tuple[int, int] | None:
    """The memory of the process before a call, and the most of it in the call."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what lies free would hide what is taken
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        return before, _status("VmHWM")
    except (OSError, LookupError, AttributeError):
        return None


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)
