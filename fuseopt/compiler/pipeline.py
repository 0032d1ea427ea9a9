"""Plan one graph, top to bottom: capture, schedule, generate, build, bind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch.fx import GraphModule

from ..capture import Captured, capture
from ..capture.fx.inputs import check_contents, static_tensors
from ..codegen import CppTarget, Source, Target
from ..compat.gc_pause import collector_paused
from ..config import Config
from ..errors import CannotBuild, ConfigError
from ..ir.graph import Schedule
from ..ir.verifier import check_graph, check_schedule
from ..runtime import run_tables
from ..runtime.cpp.table import CppTable, TableFactory
from ..runtime.cpp.toolchain import find_compiler
from ..runtime.guards.helper import PROBE
from ..runtime.plan import Plan
from ..runtime.tables.host_numbers import CPU, place_of
from ..scheduler import Machine, schedule
from . import dump
from . import report as reporting
from .report import Report
from .session import session
from .timing import Clock

#: Compilers that run at one time, at most.
COMPILERS = 4


@collector_paused()
def plan_graph(
    gm: GraphModule,
    args: Sequence[Any],
    config: Config,
    run: bool = True,
    clock: Clock | None = None,
    extend: Callable[[Captured], Captured] | None = None,
) -> tuple[Plan | None, Report]:
    """Capture, schedule, generate, build: one graph for tensors like these.

    With `run` False nothing is built and the Plan is None. `clock` has the seconds of
    what came before. `extend` makes the captured step one of more tensors. Kernels are
    still being built when the plan is given; it waits for them when it is first bound,
    and only then does the report know all seconds.
    """
    clock = clock or Clock()
    report = Report()
    # compilers run beside each other, and beside what needs no kernel
    helpers = ThreadPoolExecutor(COMPILERS)
    built: list[str] = []
    probe = helpers.submit(_probe, config, built) if run else None
    if run:
        check_contents([*static_tensors(gm).values(), *args])
    captured: Captured = capture(gm, args)
    if extend is not None:
        captured = extend(captured)
    clock.lap("capture")
    checks = config.check or config.debug > 0 or config.dump_dir is not None
    if checks:
        check_graph(captured.graph)
        clock.lap("check")

    def passed(name: str, made: Schedule | None) -> None:
        """The clock and the checks of the scheduler's passes."""
        clock.lap(name)
        if made is not None and checks:
            check_schedule(captured.graph, made)
            clock.lap("check")

    plan = schedule(captured.graph, passed, _machine(config))
    kernels = plan.kernels
    buffers = captured.graph.buffers
    devices = {kernel.name: place_of(buffers, kernel) for kernel in kernels}
    targets = {name: target_of(config, device) for name, device in devices.items()}
    sources = {kernel.name: targets[kernel.name].render(kernel) for kernel in kernels}
    clock.lap("codegen")
    loading = {
        name: helpers.submit(_load, source, config, built)
        for name, source in sources.items()
        if run and targets[name].name == "cpp"
    }
    helpers.shutdown(wait=False)
    result = None
    if run:
        replays = _replays(config, captured, plan, set(devices.values()), report)
        result = Plan(captured, plan, {}, None, replays)
    report.kernels = [
        reporting.kernel_report(k, targets[k.name].name, sources[k.name].text)
        for k in kernels
    ]
    reporting.fill(report, plan)
    report.launches = len(sources)
    clock.lap("plan")
    if result is not None and probe is not None:
        if loading:
            find_compiler()  # where there is none, that is said now
        for name, source in sources.items():
            if name not in loading:
                made = _triton_factory(source, devices[name], config)
                result.factories[name] = made

        @contextlib.contextmanager
        def opening() -> Iterator[None]:
            """What is left to do when the plan is first bound, to which it yields."""
            clock.resume()
            for name, library in loading.items():
                made = _cpp_factory(sources[name], library.result())
                result.factories[name] = made
            result.helper = probe.result()
            report.builds = len(built)
            clock.lap("build")
            yield
            clock.lap("bind")
            _tell_seconds(report, clock)

        result.opening = opening
        if config.dump_dir or config.debug:
            # what is written down tells how long the build took
            wait([probe])
            wait(loading.values())
            report.builds = len(built)
    clock.lap("build")
    _tell_seconds(report, clock)
    _dump(report, config, captured, plan, sources, targets)
    return result, report


def _machine(config: Config) -> Machine:
    """What the scheduler is to know of this one: C++ goes block by block, Triton in
    launches of its own.
    """
    own = target_of(config, CPU)
    return Machine(run_tables.BLOCK if own.name == "cpp" else 0)


def _tell_seconds(report: Report, clock: Clock) -> None:
    report.seconds = clock.seconds
    report.build_seconds = clock.seconds["build"]
    report.backend_seconds = clock.total


def target_of(config: Config, device: str) -> Target:
    """C++ on the CPU, Triton elsewhere, or what the user asked for."""
    on_cpu = device.split(":")[0] == "cpu"
    name = config.target
    if name == "auto":
        name = "cpp" if on_cpu else "triton"
    if name == "cpp":
        if not on_cpu:
            raise ConfigError(f"target='cpp' cannot run on {device}")
        return CppTarget()
    from ..codegen.triton.kernel import TritonTarget

    cuda = version_of_cuda() if device.split(":")[0] == "cuda" else None
    return TritonTarget(fast=config.numerics == "fast", cuda=cuda)


def version_of_cuda() -> tuple[int, int] | None:
    """The CUDA that torch was built with, whose functions eager's kernels call; None
    where it was built with another.
    """
    found = torch.version.cuda
    if not found:
        return None
    major, minor = (*found.split("."), "0")[:2]
    return int(major), int(minor)


def _load(source: Source, config: Config, built: list[str]) -> ctypes.CDLL:
    fast = config.numerics == "fast"
    return session.builder.load(source, config.cache_dir, fast, built)


def _cpp_factory(source: Source, built: ctypes.CDLL) -> TableFactory:
    """What makes the tables of a kernel, which launch it."""
    entry = getattr(built, source.entry)
    entry.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    entry.restype = None
    return functools.partial(CppTable, entry, session.vectors.address(built))


def _triton_factory(source: Source, device: str, config: Config) -> TableFactory:
    from ..runtime.triton.table import triton_factory

    return triton_factory(source, config.cache_dir, device, session.triton_builder)


def _replays(
    config: Config,
    captured: Captured,
    plan: Schedule,
    devices: set[str],
    report: Report,
) -> Any:
    """What captures and replays a plan's launches; None where nothing is to be.

    Raises CudaGraphError if a graph is required and cannot be.
    """
    if not config.cudagraphs:
        report.cudagraph = "off: cudagraphs=False"
        return None
    required = config.cudagraphs == "require"
    if not required and all(device.split(":")[0] == "cpu" for device in devices):
        return None
    if config.cudagraphs == "auto" and not _has_many_launches(captured, plan):
        report.cudagraph = "off: a replay takes as long as the one launch it stands for"
        return None
    from ..runtime.cudagraphs import Replays

    def tell(state: str) -> None:
        report.cudagraph = state

    return Replays(session.graphs, captured, plan, required, tell)


def _has_many_launches(captured: Captured, plan: Schedule) -> bool:
    """Does a step start more than one thing on a device: kernels, ATen calls?"""
    places = [place_of(captured.graph.buffers, kernel) for kernel in plan.kernels]
    launches = [place for place in places if place.split(":")[0] != CPU]
    return bool(plan.externs) or len(set(launches)) < len(launches)


def _probe(config: Config, built: list[str]) -> ctypes.PyDLL | None:
    """The helper that asks tensors for their addresses; None without a compiler."""
    try:
        library = session.builder.load(PROBE, config.cache_dir, False, built)
    except CannotBuild:
        return None
    return ctypes.PyDLL(library._name, handle=library._handle)


def _dump(
    report: Report,
    config: Config,
    captured: Captured,
    plan: Schedule,
    sources: Mapping[str, Source],
    targets: Mapping[str, Target],
) -> None:
    """Write the files that options or FUSEOPT_DEBUG ask for.

    Where they cannot be written, that is said once, and the step goes on.
    """
    if not config.dump_dir and not config.debug:
        return
    parent = os.path.expanduser(config.dump_dir or "fuseopt_debug")
    suffixed = {name: (x, targets[name].suffix) for name, x in sources.items()}
    kernels = report.kernels
    try:
        folder = dump.new_folder(parent)
        report.dump_dir = str(folder)
        level = config.debug or dump.SOURCES
        if level >= dump.SOURCES:
            report.kernels = [
                k.at(str(folder / f"{k.name}{suffixed[k.name][1]}"))
                for k in report.kernels
            ]
        dump.write(folder, level, report, captured.graph, plan, suffixed)
        where = f"details in {folder}"
    except OSError as error:
        report.dump_dir, report.kernels = None, kernels
        where = f"nothing can be written into {parent} ({error})"
        session.warn_once(f"fuseopt: {where}; steps go on.", f"dump {parent}")
    if config.debug:
        print(f"{report}\nfuseopt: {where}", file=sys.stderr)
