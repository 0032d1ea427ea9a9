"""Name the kernels of a step for profilers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from ..compat.profiling import profiler_range
from ..ir.graph import Graph, Kernel, Run, Schedule
from ..ir.traffic import Traffic, traffic

#: Units of numbers of elements and of bytes.
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


def kernel_name(graph: Graph, step: Kernel | Run) -> str:
    """Return a name like "fuseopt::kernel0 [148 lanes, 124.4M elements, 3.48 GB]"."""
    kernels = (step,) if isinstance(step, Kernel) else step.kernels
    return _name(step.name, graph, kernels)


def replay_name(graph: Graph, schedule: Schedule) -> str:
    """Return the name for all kernels of a captured graph."""
    name = f"replay of {len(schedule.kernels)} kernels"
    return _name(name, graph, schedule.kernels)


def _name(name: str, graph: Graph, kernels: Iterable[Kernel]) -> str:
    moved = sum((traffic(graph, k) for k in kernels), Traffic(0, 0, 0))
    return (
        f"fuseopt::{name} [{moved.lanes} lanes, {_short(moved.elements)} elements, "
        f"{_short(moved.bytes, ' ')}B]"
    )


def _short(n: int, gap: str = "") -> str:
    for unit, letter in UNITS:
        if n >= unit:
            return f"{n / unit:.4g}{gap}{letter}"
    return f"{n}{gap}"


def marked(
    name: str, calls: Iterable[Callable[[], object]]
) -> list[Callable[[], object]]:
    """Return partials of C functions within a range of a profiler, as such partials."""
    range_ = profiler_range(name)
    leave = functools.partial(range_.__exit__, None, None, None)
    return [functools.partial(range_.__enter__), *calls, leave]
