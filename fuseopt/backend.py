"""The pipeline, top to bottom: the only module that sees all the others.

`fuseopt(gm, example_inputs)` is what Dynamo calls.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import compat, explain
from .capture import Captured, capture
from .codegen import CppTarget, Source
from .config import Config, resolve
from .errors import CaptureError, CompilerMissing
from .explain import Report
from .ir import Kernel, Schedule
from .runtime.build import Builder
from .runtime.step import CompiledStep, Plan
from .runtime.table import CppTable, TableFactory
from .scheduler import schedule

log = logging.getLogger("fuseopt")


class Session:
    """What this process has compiled: reports and built kernels."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.reports: list[Report] = []
        self.warned: set[str] = set()

    def reset(self) -> None:
        self.reports.clear()
        self.warned.clear()

    def warn_once(self, message: str) -> None:
        if message not in self.warned:
            self.warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


session = Session()


def reports() -> list[Report]:
    """The Reports of what was compiled in this process, oldest first."""
    return list(session.reports)


class _Clock:
    """Seconds of each pass."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.passes: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.passes[name] = self.passes.get(name, 0.0) + now - self.last
        self.last = now


def _cpp(source: Source, config: Config) -> TableFactory:
    """Build a C++ kernel; its tables call it."""
    built = session.builder.load(source, config.cache_dir, config.numerics == "fast")
    entry = getattr(built, source.entry)
    entry.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    entry.restype = None
    vectors = ctypes.addressof(compat.vector_library())
    return functools.partial(CppTable, entry, vectors)


def _plan(gm: GraphModule, args: Sequence[Any], config: Config) -> Plan:
    """Capture, schedule, generate, build: one graph for tensors like these."""
    clock = _Clock()
    report = Report()
    captured: Captured = capture(gm, args)
    clock.lap("capture")
    plan: Schedule = schedule(captured.graph)
    clock.lap("schedule")
    target = CppTarget()
    sources = {
        step.name: target.render(step) for step in plan.steps if isinstance(step, Kernel)
    }
    clock.lap("codegen")
    builds = session.builder.builds
    factories = {name: _cpp(source, config) for name, source in sources.items()}
    clock.lap("build")
    for step in plan.steps:
        if isinstance(step, Kernel):
            source = sources[step.name]
            report.kernels.append(
                explain.kernel_report(step, source.target, source.text)
            )
    explain.fill(report, plan)
    report.launches = len(sources)
    report.builds = session.builder.builds - builds
    result = Plan(captured, plan, factories)
    clock.lap("bind")
    report.passes = clock.passes
    report.build_seconds = clock.passes["build"]
    report.backend_seconds = clock.last - clock.start
    session.reports.append(report)
    return result


def fuseopt(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The backend: compile Dynamo's graph of a step. See fuseopt.config for options."""
    config = resolve(mode, options)
    return CompiledStep(gm, lambda g, a: _plan(g, a, config), example_inputs)


def reset() -> None:
    """Called by torch._dynamo.reset(): forget reports."""
    session.reset()


fuseopt.reset = reset  # type: ignore[attr-defined]
