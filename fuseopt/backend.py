"""The pipeline, top to bottom: the only module that sees all the others.

`fuseopt(gm, example_inputs)` is what Dynamo calls; `explain` plans without running;
`reports` tells what was compiled.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import functools
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import GraphModule

from . import compat, dump
from . import report as reporting
from .capture import Captured, capture
from .capture.replay import as_eager, replay
from .capture.trace import check_tensor
from .codegen import CppTarget, Source, Target
from .config import Config, resolve
from .errors import (
    CaptureError,
    CompilerMissing,
    ConfigError,
    UnsupportedInput,
    VerifyError,
)
from .ir import Kernel, Schedule
from .report import PartReport, Report
from .runtime.build import Builder
from .runtime.probe import PROBE
from .runtime.step import CompiledStep, Plan
from .runtime.table import CppTable, TableFactory
from .runtime.vector import Vectors
from .scheduler import schedule
from .split import Part, attribute, decide, join
from .verify import check_graph, check_schedule

log = logging.getLogger("fuseopt")

#: The attribute that marks a step which fuseopt.compile made.
COMPILED = "_fuseopt"


class Session:
    """What this process has compiled: reports and built kernels."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.vectors = Vectors()
        self.reports: list[Report] = []
        self.warned: set[str] = set()

    @functools.cached_property
    def triton_builder(self) -> Any:
        """Made on first use, so that a CPU never imports Triton."""
        from .runtime.triton_table import TritonBuilder

        return TritonBuilder()

    def reset(self) -> None:
        self.reports.clear()
        self.warned.clear()

    def warn_once(self, message: str, about: str = "") -> None:
        """Warn, unless that was done before about the same."""
        if (about or message) not in self.warned:
            self.warned.add(about or message)
            warnings.warn(message, RuntimeWarning, stacklevel=3)


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


# ---------------------------------------------------------------- targets


def _device(captured: Captured, kernel: Kernel) -> str:
    """The device of a kernel's tensors. Raises CaptureError if they are on several."""
    buffers = captured.graph.buffers
    named = {
        buffers[b].device: buffers[b].name
        for v in kernel.variants
        for column in v.columns
        for b in column
    }
    if len(named) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in named.items())
        raise CaptureError(f"one update uses tensors of several devices: {places}")
    return next(iter(named))


def _target(config: Config, device: str) -> Target:
    """C++ on the CPU, Triton elsewhere, or what the user asked for."""
    on_cpu = device.split(":")[0] == "cpu"
    name = config.target
    if name == "auto":
        name = "cpp" if on_cpu else "triton"
    if name == "cpp":
        if not on_cpu:
            raise ConfigError(f"target='cpp' cannot run on {device}")
        return CppTarget()
    from .codegen.triton import TritonTarget

    return TritonTarget()


def _factory(
    target: Target, source: Source, device: str, config: Config
) -> TableFactory:
    """Build a kernel; the result makes its tables, which launch it."""
    if target.name == "cpp":
        built = session.builder.load(
            source, config.cache_dir, config.numerics == "fast"
        )
        entry = getattr(built, source.entry)
        entry.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        entry.restype = None
        return functools.partial(CppTable, entry, session.vectors.address(built))
    from .runtime.triton_table import triton_factory

    return triton_factory(source, config.cache_dir, device, session.triton_builder)


def _probe(config: Config) -> ctypes.PyDLL | None:
    """The helper that asks tensors for their addresses; None without a compiler."""
    try:
        built = session.builder.load(PROBE, config.cache_dir, False)
    except CompilerMissing:
        return None
    return ctypes.PyDLL(built._name, handle=built._handle)


# ---------------------------------------------------------------- the pipeline


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Planning makes many small objects that live on: collecting among Dynamo's own,
    again and again, would take longer than the planning.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@_collector_paused()
def _plan(
    gm: GraphModule, args: Sequence[Any], config: Config, run: bool = True
) -> tuple[Plan | None, Report]:
    """Capture, schedule, generate, build: one graph for tensors like these.

    With `run` False nothing is built and the Plan is None.
    """
    clock = _Clock()
    report = Report()
    helpers = ThreadPoolExecutor(1)
    # the compiler runs beside capture where the cache does not have the probe yet
    probe = helpers.submit(_probe, config) if run else None
    helpers.shutdown(wait=False)
    builds = session.builder.builds
    captured: Captured = capture(gm, args)
    check_graph(captured.graph)
    clock.lap("capture")
    plan: Schedule = schedule(captured.graph)
    if config.debug or config.dump_dir:
        check_schedule(captured.graph, plan)
    clock.lap("schedule")
    kernels = [step for step in plan.steps if isinstance(step, Kernel)]
    devices = {kernel.name: _device(captured, kernel) for kernel in kernels}
    targets = {name: _target(config, device) for name, device in devices.items()}
    sources = {kernel.name: targets[kernel.name].render(kernel) for kernel in kernels}
    clock.lap("codegen")
    factories: dict[str, TableFactory] = {}
    if run:
        for name, source in sources.items():
            factories[name] = _factory(targets[name], source, devices[name], config)
    helper = probe.result() if probe is not None else None
    clock.lap("build")
    result = Plan(captured, plan, factories, helper) if run else None
    report.kernels = [
        reporting.kernel_report(k, targets[k.name].name, sources[k.name].text)
        for k in kernels
    ]
    reporting.fill(report, plan)
    report.launches = len(sources)
    report.builds = session.builder.builds - builds
    clock.lap("bind")
    report.passes = clock.passes
    report.build_seconds = clock.passes["build"]
    report.backend_seconds = clock.last - clock.start
    _dump(report, config, captured, plan, sources, targets)
    return result, report


def _dump(
    report: Report,
    config: Config,
    captured: Captured,
    plan: Schedule,
    sources: Mapping[str, Source],
    targets: Mapping[str, Target],
) -> None:
    """Write the files that options or FUSEOPT_DEBUG ask for."""
    if not config.dump_dir and not config.debug:
        return
    folder = dump.new_folder(config.dump_dir or "fuseopt_debug")
    report.dump_dir = str(folder)
    level = config.debug or dump.SOURCES
    suffixed = {name: (x, targets[name].suffix) for name, x in sources.items()}
    if level >= dump.SOURCES:
        report.kernels = [
            k.at(str(folder / f"{k.name}{suffixed[k.name][1]}")) for k in report.kernels
        ]
    dump.write(folder, level, report, captured.graph, plan, suffixed)
    if config.debug:
        print(f"{report}\nfuseopt: details in {folder}", file=sys.stderr)


def _fall_back(
    gm: GraphModule,
    args: Sequence[Any],
    config: Config,
    reason: str,
    eager: bool,
    parts: Sequence[PartReport] = (),
) -> Callable[..., Any]:
    """Run a graph that is no optimizer step elsewhere, and report it."""
    where = _elsewhere(config, reason, eager)
    told = Report(fallback=f"It runs in {where}: {reason}", parts=list(parts))
    session.reports.append(told)
    return _run_elsewhere(gm, args, where)


def _elsewhere(config: Config, reason: str, eager: bool = False) -> str:
    """Where to run what is no update. Raises CaptureError if nowhere."""
    if config.fallback == "error":
        raise CaptureError(f"{reason} (options={{'fallback': 'error'}} was given)")
    where = "eager" if eager else config.fallback
    log.info("a graph goes to %s: %s", where, reason)
    return where


def _run_elsewhere(
    gm: GraphModule, args: Sequence[Any], where: str
) -> Callable[..., Any]:
    if where == "eager":
        return as_eager(gm)
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(gm, list(args))  # type: ignore[return-value]


def _verified(gm: GraphModule, args: Sequence[Any], step: Callable[[], Any]) -> Any:
    """Run a step and eager beside it on clones; raise at the first bit that differs."""
    statics, given, expected = replay(gm, args)
    result = step()
    pairs = [(name, getattr(gm, name), want) for name, want in statics.items()]
    pairs += [
        (f"argument {i}", got, want)
        for i, (got, want) in enumerate(zip(args, given, strict=True))
    ]
    if isinstance(result, (list, tuple)):
        pairs += [
            (f"result {i}", got, want)
            for i, (got, want) in enumerate(zip(result, expected, strict=True))
        ]
    for name, got, want in pairs:
        if isinstance(got, torch.Tensor):
            where = compat.first_difference(got.detach(), want)
            if where is not None:
                raise VerifyError(f"{name}: {where}")
    return result


def fuseopt(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: compile Dynamo's graph of a step.

    `mode` and `options` as in fuseopt.config. Raises ConfigError, UnsupportedInput.
    """
    config = resolve(mode, options)
    args = list(example_inputs)
    decision = decide(gm, args, compat.traces_step())
    if decision.parts:
        return _split(gm, args, config, decision.parts)
    if decision.whole != "update":
        eager = decision.whole == "eager"
        return _fall_back(gm, args, config, decision.why, eager)
    parts = [PartReport("all", "fuseopt", decision.why)] if decision.why else []
    return _update(gm, args, config, parts)


def _update(
    gm: GraphModule, args: Sequence[Any], config: Config, parts: Sequence[PartReport]
) -> Callable[..., Any]:
    """Compile a graph that is an update; eager runs it where that cannot be."""

    def plan(graph: GraphModule, now: Sequence[Any]) -> Plan:
        made, report = _plan(graph, now, config)
        report.parts = list(parts)
        session.reports.append(report)
        assert made is not None
        return made

    def refuse(error: CaptureError) -> None:
        where = _elsewhere(config, str(error), eager=True)
        told = Report(fallback=f"A call runs in {where}: {error}", parts=list(parts))
        session.reports.append(told)

    verify = _verified if config.verify else None
    try:
        return CompiledStep(gm, plan, args, verify, refuse)
    except CaptureError as error:
        return _fall_back(gm, args, config, str(error), True, parts)
    except CompilerMissing as error:
        session.warn_once(f"fuseopt: {error} Until then steps run in eager.")
        return _fall_back(gm, args, config, str(error), True, parts)


def _values_of(gm: GraphModule, args: Sequence[Any], part: Part) -> list[Any]:
    """The arguments of a part, as far as they are known before the graph runs: what
    another part makes is the tensor that tracing saw.
    """
    known = dict(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True))
    return [
        attribute(gm, str(x.target))
        if x.op == "get_attr"
        else known.get(x, x.meta.get("example_value"))
        for x in part.inputs
    ]


def _part_reports(parts: Sequence[Part], elsewhere: str) -> list[PartReport]:
    return [
        PartReport(
            part.side,
            "fuseopt" if part.side == "update" else elsewhere,
            f"{sum(n.op.startswith('call') for n in part.gm.graph.nodes)} calls; "
            f"{part.why}",
        )
        for part in parts
    ]


def _split(
    gm: GraphModule, args: Sequence[Any], config: Config, parts: Sequence[Part]
) -> Callable[..., Any]:
    """Run each part of a graph where it belongs, one after another."""
    other = next(part for part in parts if part.side != "update")
    where = _elsewhere(config, f"a part of the graph is no update: {other.why}")
    told = _part_reports(parts, where)
    runs: list[Callable[..., Any]] = []
    for part in parts:
        values = _values_of(gm, args, part)
        if part.side != "update":
            runs.append(_run_elsewhere(part.gm, values, where))
        elif all(x.op in ("placeholder", "get_attr") for x in part.inputs):
            runs.append(_update(part.gm, values, config, told))
        else:
            # sizes of what another part makes are known when it has run
            make = functools.partial(_update, config=config, parts=told)
            runs.append(_AtFirstCall(part.gm, make))
    return join(gm, parts, runs)


class _AtFirstCall:
    """Compiles a graph for the arguments of its first call."""

    def __init__(self, gm: GraphModule, make: Callable[..., Any]) -> None:
        self.gm = gm
        self.make = make
        self.run: Callable[..., Any] | None = None

    def __call__(self, *args: Any) -> Any:
        if self.run is None:
            self.run = self.make(self.gm, args)
        return self.run(*args)


def reset() -> None:
    """Called by torch._dynamo.reset(): forget reports."""
    session.reset()


fuseopt.reset = reset  # type: ignore[attr-defined]


def _refuse_untraceable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedInput for a step that Dynamo would run in eager, silently."""
    reason = compat.never_compiled(optimizer)
    if reason:
        raise UnsupportedInput(reason)
    for number, group in enumerate(optimizer.param_groups):
        for position, p in enumerate(group["params"]):
            if p.grad is not None:
                check_tensor(
                    f"the gradient of parameter {position} of group {number}", p.grad
                )


compat.on_trace(fuseopt, _refuse_untraceable)
compat.trace_power(fuseopt)


def _tell_of_limit(function: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Warn that something runs in eager from now on: Dynamo itself only logs it."""
    limit = "torch has compiled {} as often as it does one function, and runs in eager "
    if optimizer is None:
        what, why = function, "any call that these compilations do not fit."
    elif hasattr(optimizer.step, COMPILED):
        what = f"the step of one {type(optimizer).__name__}"
        why = "any call that these do not fit."
    else:
        what = f"{type(optimizer).__name__}.step"
        why = (
            "any optimizer that these compilations do not fit, this one included: all "
            "of a class share one step. fuseopt.compile(optimizer) compiles each apart."
        )
    session.warn_once(
        f"fuseopt: {limit.format(what)}{why} TORCH_LOGS=recompiles shows what differs."
    )


compat.on_recompile_limit(fuseopt, _tell_of_limit)


def _tell_of_graph_break(
    place: str, reason: str, optimizer: torch.optim.Optimizer
) -> None:
    """Warn that Dynamo cannot see a step as one graph."""
    if hasattr(optimizer.step, COMPILED):
        then = "What comes before and after is compiled apart; a loop around it is not."
    else:
        then = (
            "Dynamo then often leaves all of the step to eager; with "
            "fuseopt.compile(optimizer), what comes before and after is compiled, "
            "unless the line lies in a loop."
        )
    session.warn_once(
        f"fuseopt: Dynamo ends its graph of {type(optimizer).__name__}.step at {place} "
        f"({reason}). {then} A branch on a tensor's value can be written as "
        "torch.where; TORCH_LOGS=graph_breaks has more.",
        place,
    )


compat.on_graph_break(fuseopt, _tell_of_graph_break)


# ---------------------------------------------------------------- explain


def unfuse(optimizer: torch.optim.Optimizer) -> list[tuple[dict[str, Any], Any, Any]]:
    """Let groups of torch's fused kernels take the foreach form.

    Returns what they said before: (group, fused, foreach).
    """
    kept = []
    for group in optimizer.param_groups:
        if group.get("fused"):
            kept.append((group, group["fused"], group.get("foreach")))
            group["fused"] = False
            if "foreach" in group:
                group["foreach"] = True
    return kept


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy of an optimizer over memory of its own, with uninitialised contents."""
    memo: dict[int, Any] = {}
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p in params:
        twin = torch.nn.Parameter(torch.empty_like(p), requires_grad=p.requires_grad)
        memo[id(p)] = twin
    no_grad = all(p.grad is None for p in params)
    for p in params:
        source = p if no_grad else p.grad
        if source is not None:
            memo[id(p)].grad = torch.empty_like(source, requires_grad=False)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                memo[id(value)] = torch.empty_like(value)
    return copy.deepcopy(optimizer, memo)


def explain(
    step: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None
) -> Report:
    """Plan a step without running it or changing any tensor.

    `step`: `optimizer.step`, or a function of `args`. Parameters without any gradient
    are taken to have one. Returns the Report of the first graph; `build_seconds` is 0.
    Raises UnsupportedInput where Dynamo would never call a backend.
    """
    config = resolve(None, options)
    owner = getattr(step, "__self__", None)
    if isinstance(owner, torch.optim.Optimizer):
        twin = _twin(owner)
        if hasattr(step, COMPILED):
            unfuse(twin)
        reason = compat.never_compiled(twin)
        if reason:
            raise UnsupportedInput(reason)
        step = getattr(twin, step.__name__)
    found: list[Report] = []

    class Planned(Exception):
        """Leaves the traced function before anything of it runs."""

    def planner(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        decision = decide(gm, inputs)
        update = [part for part in decision.parts if part.side == "update"]
        if decision.whole != "update":
            found.append(Report(fallback=decision.why))
        elif update:
            values = _values_of(gm, inputs, update[0])
            report = _plan(update[0].gm, values, config, run=False)[1]
            report.parts = _part_reports(decision.parts, config.fallback)
            found.append(report)
        else:
            found.append(_plan(gm, list(inputs), config, run=False)[1])

        def leave(*_: Any) -> Any:
            raise Planned

        return leave

    with contextlib.suppress(Planned), compat.scalar_outputs():
        torch.compile(step, backend=planner)(*args)
    if not found:
        raise UnsupportedInput(
            "Dynamo made no graph of this function; run it with "
            "TORCH_LOGS=graph_breaks to see why"
        )
    return found[0]
