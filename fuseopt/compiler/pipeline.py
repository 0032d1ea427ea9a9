"""Plan one graph, top to bottom: capture, schedule, generate, build, bind."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture import Captured, capture
from ..capture.fx.inputs import check_contents, static_tensors
from ..codegen import CppTarget, Source, Target
from ..codegen.optable import VECTOR_KINDS
from ..compat.gc_pause import collector_paused
from ..config import Config
from ..errors import BuildError, CannotBuild, ConfigError, EagerOnly
from ..ir.graph import Schedule
from ..ir.verifier import check_graph, check_schedule
from ..runtime import run_tables
from ..runtime.chains import SOURCE as CHAINS
from ..runtime.chains import Chains, chains_of
from ..runtime.cpp.table import CppTable, TableFactory
from ..runtime.executor import DirectExecutor, Executor, Program
from ..runtime.guards.library import HELPER
from ..runtime.plan import Built, Plan
from ..runtime.tables.host_numbers import CPU, place_of
from ..scheduler import Machine, schedule
from ..scheduler.homes import with_homes
from . import again, batching, dump, logs
from . import report as reporting
from .gram_form import with_gram_forms
from .report import Report
from .scaled_sums import has_products, with_scaled_sums
from .session import session
from .timing import Clock

#: The largest number of compilers that run at once.
COMPILERS = 4
#: What the text of a kernel has that adds up.
SUMS = "struct SumRun"


class Lowered(NamedTuple):
    """A captured and scheduled graph with the sources of its kernels, by name.

    `targets`, `places`: the target and the device of each kernel, by name.
    `algorithms`: what replaces the user's, see Report.
    """

    captured: Captured
    schedule: Schedule
    sources: dict[str, Source]
    targets: dict[str, Target]
    places: dict[str, str]
    algorithms: tuple[str, ...] = ()
    chains: Chains | None = None


@collector_paused()
def plan_graph(
    gm: GraphModule,
    args: Sequence[Any],
    config: Config,
    clock: Clock | None = None,
    captured: Callable[[GraphModule, Sequence[Any]], Captured] | None = None,
    written: bool = True,
) -> tuple[Program, Report]:
    """Capture, schedule, generate and build a graph for tensors with these layouts.

    `clock`: holds the seconds so far. `captured(gm, args)` replaces `capture`, and may
    extend the step. `written`: write logs and dumps.

    Compilers may still run when this returns. The plan waits for them when it is first
    bound; only then does the report have all seconds.
    """
    clock, report = clock or Clock(), Report()
    # compilers run in parallel, also to the work below that needs no kernel
    compilers = ThreadPoolExecutor(COMPILERS)
    built: list[str] = []
    helper = compilers.submit(_helper, config, built)
    check_contents([*static_tensors(gm).values(), *args])
    lowered = _lower(gm, args, config, clock, captured)
    sources, targets = lowered.sources, lowered.targets
    loading = {
        name: compilers.submit(_load, source, config, built)
        for name, source in sources.items()
        if targets[name].name == "cpp"
    }
    compilers.shutdown(wait=False)
    executor = _executor(config, lowered, report)
    _describe(report, lowered)
    clock.lap("plan")
    # raises here if there is neither a compiler nor a prebuilt kernel
    for name in loading:
        session.builder.compiler_for(sources[name], config.numerics == "fast")
    others = {
        name: _triton_factory(source, lowered.places[name], config)
        for name, source in sources.items()
        if name not in loading
    }

    def build() -> Built:
        """Wait for the compilers."""
        factories = {
            name: _cpp_factory(sources[name], library.result())
            for name, library in loading.items()
        }
        report.builds = len(built)
        return Built({**others, **factories}, helper.result(), config.raw_fields)

    kernels = _Building(build, clock, lambda: _add_seconds(report, clock))
    may = batching.allowed(session.probes, config, lowered.chains)
    plan = Plan(lowered.captured, lowered.schedule, kernels, may, lowered.chains)
    if written and config.writes:
        # dumps have the seconds of the build
        wait([helper])
        wait(loading.values())
        report.builds = len(built)
    clock.lap("build")
    _add_seconds(report, clock)
    if written:
        _write_down(report, config, lowered)
    return Program(plan, executor), report


@collector_paused()
def explain_graph(
    gm: GraphModule, args: Sequence[Any], config: Config, clock: Clock | None = None
) -> Report:
    """Return the Report of a graph without building or running its kernels.

    `args` may be tensors without contents. `clock` as in `plan_graph`.
    """
    clock, report = clock or Clock(), Report()
    lowered = _lower(gm, args, config, clock)
    _describe(report, lowered)
    clock.lap("plan")
    clock.lap("build")
    _add_seconds(report, clock)
    _write_down(report, config, lowered)
    return report


def replanner(
    gm: GraphModule,
    config: Config,
    on_report: Callable[[Report], None],
    clock: Clock | None = None,
    captured: Callable[[GraphModule, Sequence[Any]], Captured] | None = None,
    written: bool = True,
) -> Callable[[Sequence[Any]], Program]:
    """Return a function that plans a graph for the arguments of a call.

    `on_report(report)` is called with each Report. `clock`, `captured`, `written` as in
    `plan_graph`; the clock is used for the first plan.
    """
    clocks = [clock]

    def plan(args: Sequence[Any]) -> Program:
        spent = clocks.pop() if clocks else None
        program, report = plan_graph(gm, args, config, spent, captured, written)
        on_report(report)
        return program

    return plan


def _lower(
    gm: GraphModule,
    args: Sequence[Any],
    config: Config,
    clock: Clock,
    capture_: Callable[[GraphModule, Sequence[Any]], Captured] | None = None,
) -> Lowered:
    """Capture, schedule, generate: the work that needs no compiler."""
    captured = (capture_ or capture)(gm, args)
    graph = with_homes(captured.graph)
    if graph is not captured.graph:
        captured = dataclasses.replace(captured, graph=graph)
    algorithms: tuple[str, ...] = ()
    if config.numerics == "fast":
        captured, algorithms = with_gram_forms(captured)
    clock.lap("capture")
    checks = config.check or config.writes
    if checks:
        check_graph(captured.graph)
        clock.lap("check")

    def passed(name: str, scheduled: Schedule | None) -> None:
        """Record the time of a scheduler pass, and check its result."""
        clock.lap(name)
        if scheduled is not None and checks:
            check_schedule(captured.graph, scheduled)
            clock.lap("check")

    chains = _chains(config) if has_products(captured) else None
    products = batching.Products(captured, session.probes, config, chains)
    if chains is not None:
        captured = with_scaled_sums(captured, products)
        products.calls = captured.calls
    machine = dataclasses.replace(_machine(config), batching=products)
    plan = schedule(captured.graph, passed, machine)
    buffers = captured.graph.buffers
    places = {kernel.name: place_of(buffers, kernel) for kernel in plan.kernels}
    targets = {name: target_of(config, device) for name, device in places.items()}
    sources = {k.name: targets[k.name].render(k) for k in plan.kernels}
    if not compat.VECTORS.available():
        _refuse_vectors(source.text for source in sources.values())
    _refuse_folds(source.text for source in sources.values())
    clock.lap("codegen")
    return Lowered(captured, plan, sources, targets, places, algorithms, chains)


def _refuse_vectors(texts: Iterable[str]) -> None:
    """Raise EagerOnly if a kernel calls functions of eager's vector library."""
    if any(f"{kind}(t.library" in text for text in texts for kind in VECTOR_KINDS):
        raise EagerOnly(
            f"torch {torch.__version__} lacks vector-library, whose functions have "
            f"eager's bits ({compat.VECTORS.missing()})"
        )


def _refuse_folds(texts: Iterable[str]) -> None:
    """Raise EagerOnly where a kernel adds up and torch's order is unknown: on aarch64
    with other registers than NEON's.
    """
    if platform.machine() not in ("aarch64", "arm64"):
        return
    registers = torch.backends.cpu.get_cpu_capability()
    if registers != "DEFAULT" and any(SUMS in text for text in texts):
        raise EagerOnly(
            f"torch adds up in {registers} registers here, whose order no kernel has"
        )


def _describe(report: Report, lowered: Lowered) -> None:
    """Add the kernels and the schedule to a report."""
    graph, targets, sources = lowered.captured.graph, lowered.targets, lowered.sources
    report.kernels = [
        reporting.kernel_report(graph, k, targets[k.name].name, sources[k.name].text)
        for k in lowered.schedule.kernels
    ]
    reporting.fill(report, graph, lowered.schedule)
    report.algorithms = list(lowered.algorithms)
    report.launches = len(lowered.sources)


class _Building:
    """Kernels that compilers may still be building; implements runtime.plan.Kernels.

    The clock counts the seconds that the first binding waits, and those that it takes;
    then `done` is called.
    """

    def __init__(
        self, build: Callable[[], Built], clock: Clock, done: Callable[[], None]
    ) -> None:
        self._build = build
        self._clock = clock
        self._done = done
        self._built: Built | None = None

    @contextlib.contextmanager
    def ready(self) -> Iterator[Built]:
        """Yield the kernels; the first call waits for the compilers."""
        if self._built is not None:
            yield self._built
            return
        self._clock.resume()
        built = self._build()
        self._clock.lap("build")
        yield built
        self._clock.lap("bind")
        self._done()
        self._built = built


def _machine(config: Config) -> Machine:
    """Return the scheduler's Machine: only C++ kernels run in blocks."""
    target = target_of(config, CPU)
    return Machine(run_tables.BLOCK if target.name == "cpp" else 0)


def _add_seconds(report: Report, clock: Clock) -> None:
    report.seconds = clock.seconds
    report.build_seconds = clock.seconds["build"]
    report.backend_seconds = clock.total


def target_of(config: Config, device: str) -> Target:
    """Return C++ for the CPU and Triton for other devices, or the target in the
    options.

    Raises ConfigError for C++ on another device.
    """
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
    """Return torch's CUDA version, whose functions eager's kernels call.

    None for a torch without CUDA.
    """
    version = torch.version.cuda
    if not version:
        return None
    major, minor = (*version.split("."), "0")[:2]
    return int(major), int(minor)


def _load(source: Source, config: Config, built: list[str]) -> ctypes.CDLL:
    fast = config.numerics == "fast"
    return session.builder.load(source, config.cache_dir, fast, built)


def _cpp_factory(source: Source, built: ctypes.CDLL) -> TableFactory:
    """Return the TableFactory of a C++ kernel in a loaded library."""
    entry = getattr(built, source.entry)
    entry.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    entry.restype = None
    return functools.partial(CppTable, entry, session.vectors.address(built))


def factory_of(
    target: Target, source: Source, device: str, config: Config
) -> TableFactory:
    """Build one kernel; return its TableFactory. Raises CannotBuild."""
    if target.name == "cpp":
        return _cpp_factory(source, _load(source, config, []))
    return _triton_factory(source, device, config)


def _triton_factory(source: Source, device: str, config: Config) -> TableFactory:
    from ..runtime.triton.table import triton_factory

    return triton_factory(source, config.cache_dir, device, session.triton_builder)


def _executor(config: Config, lowered: Lowered, report: Report) -> Executor:
    """Return the executor of a plan: Replays if options and plan allow it, or Direct.

    Raises CudaGraphError if a graph is required but impossible.
    """
    if not config.cudagraphs:
        report.cudagraph = "off: cudagraphs=False"
        return DirectExecutor()
    required = config.cudagraphs == "require"
    if not required and all(x.split(":")[0] == CPU for x in lowered.places.values()):
        return DirectExecutor()
    if config.cudagraphs == "auto" and not _has_many_launches(lowered):
        report.cudagraph = "off: a replay takes as long as the one launch it stands for"
        return DirectExecutor()
    from ..runtime.cudagraphs import Replays

    def on_state(state: str) -> None:
        report.cudagraph = state

    captured, plan = lowered.captured, lowered.schedule
    return Replays(session.graphs, captured, plan, required, on_state)


def _has_many_launches(lowered: Lowered) -> bool:
    """Does a step start several launches on a device, such as kernels or ATen calls?"""
    launches = [x for x in lowered.places.values() if x.split(":")[0] != CPU]
    return bool(lowered.schedule.externs) or len(set(launches)) < len(launches)


def _helper(config: Config, built: list[str]) -> ctypes.PyDLL | None:
    """Return the library of the guards; None without a compiler."""
    try:
        library = session.builder.load(HELPER, config.cache_dir, False, built)
    except CannotBuild:
        return None
    return ctypes.PyDLL(library._name, handle=library._handle)


def _chains(config: Config) -> Chains | None:
    """Return the library of chains of products; None without a compiler."""
    try:
        library = session.builder.load(CHAINS, config.cache_dir, False)
        compiler = session.builder.compiler_for(CHAINS, False)
    except (CannotBuild, BuildError):
        return None
    key = str(compiler) if isinstance(compiler, Path) else compiler.key(CHAINS, False)
    return chains_of(library, key)


def _parent(config: Config) -> str:
    """Return the folder for the dumps of graphs."""
    beside = compat.debug_folder() if config.compile_debug else None
    return os.path.expanduser(config.dump_dir or beside or "fuseopt_debug")


def _write_down(report: Report, config: Config, lowered: Lowered) -> None:
    """Log, and write the files that options or FUSEOPT_DEBUG request.

    If the files cannot be written, fuseopt warns once, and the step goes on.
    """
    graph, plan = lowered.captured.graph, lowered.schedule
    logs.log(report, graph, plan, lowered.sources)
    if not config.writes:
        return
    parent = _parent(config)
    targets = lowered.targets
    suffixed = {name: (x, targets[name].suffix) for name, x in lowered.sources.items()}
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
        dump.write(folder, level, report, graph, plan, suffixed)
        if level >= dump.SOURCES:
            from .. import __version__

            again.save(folder, __version__, graph, _machine(config), targets)
        where = f"details in {folder}"
    except OSError as error:
        report.dump_dir, report.kernels = None, kernels
        where = f"nothing can be written into {parent} ({error})"
        session.warn_once(f"fuseopt: {where}; steps go on.", f"dump {parent}")
    if config.debug:
        print(f"{report}\nfuseopt: {where}", file=sys.stderr)
