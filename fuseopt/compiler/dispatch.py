"""Compile a graph of Dynamo's to a step, or run it in eager or Inductor.

An optimizer update becomes a step; a Report gives the reason for other graphs. The
first graph imports this module, and with it all compiler code.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture.fx.eager import as_eager, replay
from ..capture.fx.inputs import attribute
from ..config import Config, resolve
from ..errors import CannotBuild, CaptureError, EagerOnly, VerifyError
from ..runtime.binding import Binding
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from . import internal_errors, pipeline
from .diagnostics import warn_of_lacks, warn_of_step
from .inner_tensors import InnerTensorGraph, holds_wrappers
from .partition import Part, decide, join
from .report import PartReport, Report
from .session import session
from .timing import Clock

log = logging.getLogger("fuseopt")


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile Dynamo's graph of a step. Raises ConfigError, UnsupportedInput."""
    config = resolve(mode, options)
    warn_of_lacks()
    why, owners = compat.unsound_graph(gm)
    if why:
        for owner in owners:
            warn_of_step(owner, why)
        compat.refuse_step(owners, why)
    compiled = _compiled(gm, list(example_inputs), config)
    return compat.held_to_plain_code(compiled, gm, owners) if owners else compiled


def _compiled(
    gm: GraphModule, args: Sequence[Any], config: Config
) -> Callable[..., Any]:
    clock = Clock()
    try:
        decision = decide(gm, args, compat.traces_step())
    except Exception as error:
        why = _failed(error, gm, args, config)
        return _fall_back(gm, args, config, why, True)
    clock.lap("decide")
    if decision.parts or decision.whole == "update":
        refuse_unknown(gm)
    if decision.parts:
        return _split(gm, args, config, decision.parts)
    if decision.whole != "update":
        if decision.whole == "eager step":
            _warn_of(decision.why, config)
        eager = decision.whole != "fallback"
        return _fall_back(gm, args, config, decision.why, eager)
    parts = [PartReport("all", "fuseopt", decision.why)] if decision.why else []
    return _update(gm, args, config, parts, clock)


def refuse_unknown(gm: GraphModule) -> None:
    """Make an update run in eager if it has an input that no guard covers."""
    why, owners = compat.unknown_input(gm)
    if why:
        for owner in owners:
            warn_of_step(owner, why)
        if not owners:
            session.reports.append(Report(fallback=f"It runs in eager: {why}"))
            session.warn_once(f"fuseopt: an update runs in eager: {why}.")
        compat.refuse_step(owners, why)


def _update(
    gm: GraphModule,
    args: Sequence[Any],
    config: Config,
    parts: Sequence[PartReport],
    clock: Clock | None = None,
) -> Callable[..., Any]:
    """Compile a graph that is an update; eager runs it if that fails.

    `clock`: holds the seconds so far, for the first plan.
    """

    def on_report(report: Report) -> None:
        report.parts = list(parts)
        session.reports.append(report)

    def refused(error: CaptureError, args: Sequence[Any]) -> Callable[..., Any]:
        _warn_of(error, config)
        return _fall_back(gm, args, config, str(error), True, parts)

    verify = functools.partial(_verified, gm) if config.verify else None
    try:
        if holds_wrappers(gm, args):
            within = functools.partial(_update, config=config, parts=parts)
            return InnerTensorGraph(gm, args, within, refused)
        plan = pipeline.replanner(gm, config, on_report, clock)
        program = plan(args)
        source = GraphTensors(gm, program.plan.captured.tensor_args)
        return CompiledStep(
            source, program, plan, EagerCalls(gm, config, on_report), verify
        )
    except CaptureError as error:
        if compat.has_symbols() and not isinstance(error, EagerOnly):
            raise compat.TraceAgain(str(error)) from error
        return refused(error, args)
    except CannotBuild as error:
        eager = _fall_back(gm, args, config, str(error), True, parts)
        _warn_of_eager(error)
        return eager
    except Exception as error:
        why = _failed(error, gm, args, config)
        return _fall_back(gm, args, config, why, True, parts)


class EagerCalls:
    """Runs single calls in eager for which a graph cannot be planned; a ChangePolicy.

    `on_report(report)` is called with a Report for each new reason.
    """

    def __init__(
        self, gm: GraphModule, config: Config, on_report: Callable[[Report], None]
    ) -> None:
        self.gm = gm
        self.config = config
        self.on_report = on_report
        self.reported: set[str] = set()

    def changed(self, bound: Binding, metadata: list[Any], found: int) -> None:
        """Do nothing: a plan follows every change."""

    def overlapping(self) -> None:
        """Do nothing: a plan follows every change."""

    def refused(self, error: CaptureError) -> None:
        """Report a call that runs in eager. Raises CaptureError if the options forbid
        that.
        """
        _warn_of(error, self.config)
        where = _elsewhere(self.config, str(error), eager=True)
        text = f"A call runs in {where}: {error}"
        if text not in self.reported:  # many calls may have the same reason
            self.reported.add(text)
            self.on_report(Report(fallback=text))

    def failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """Report an error of fuseopt's own or of its compilers; return False for
        others.
        """
        if isinstance(error, CannotBuild):
            where = _elsewhere(self.config, str(error), eager=True)
            _warn_of_eager(error)
        elif internal_errors.is_mishap(error):
            where = _failed(error, self.gm, args, self.config)
        else:
            return False
        self.on_report(Report(fallback=f"It runs in eager: {where}"))
        return True

    def eager(self) -> Callable[..., Any]:
        """Return the graph as a function with eager's bits."""
        return as_eager(self.gm)


def _failed(
    error: Exception, gm: GraphModule, args: Sequence[Any], config: Config
) -> str:
    """Report an error of fuseopt's own, and return the reason; raise other errors."""
    if not internal_errors.is_mishap(error):
        raise error
    return internal_errors.report(error, gm, args, config, "The step runs in eager.")


def _warn_of(reason: CaptureError | str, config: Config) -> None:
    """Warn once that a step runs in eager, unless the options forbid that."""
    if config.fallback != "error":
        session.warn_once(f"fuseopt: a step runs in eager, because {reason}")


def _warn_of_eager(error: CannotBuild) -> None:
    session.warn_once(f"fuseopt: steps run in eager: {error}", "no kernel can be built")


def _split(
    gm: GraphModule, args: Sequence[Any], config: Config, parts: Sequence[Part]
) -> Callable[..., Any]:
    """Compile or fall back for each part of a graph, and run them in order."""
    other = next(part for part in parts if part.side != "update")
    where = _elsewhere(config, f"a part of the graph is not an update: {other.why}")
    _without_symbols(args, where)
    reports = part_reports(parts, where)
    runs: list[Callable[..., Any]] = []
    for part in parts:
        values = values_of(gm, args, part)
        if part.side != "update":
            runs.append(_run_elsewhere(part.gm, values, where))
        elif all(x.op in ("placeholder", "get_attr") for x in part.inputs):
            runs.append(_update(part.gm, values, config, reports))
        else:
            # the other part must run before its results have sizes
            make = functools.partial(_update, config=config, parts=reports)
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


def values_of(gm: GraphModule, args: Sequence[Any], part: Part) -> list[Any]:
    """Return the arguments of a part before the graph runs.

    Results of other parts are the example values of the trace.
    """
    values = dict(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True))
    return [
        attribute(gm, str(x.target))
        if x.op == "get_attr"
        else values.get(x, x.meta.get("example_value"))
        for x in part.inputs
    ]


def part_reports(parts: Sequence[Part], elsewhere: str) -> list[PartReport]:
    """Describe each part, and where it runs."""
    return [
        PartReport(
            part.side,
            "fuseopt" if part.side == "update" else elsewhere,
            f"{sum(n.op.startswith('call') for n in part.gm.graph.nodes)} calls; "
            f"{part.why}",
        )
        for part in parts
    ]


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
    _without_symbols(args, where)
    report = Report(fallback=f"It runs in {where}: {reason}", parts=list(parts))
    session.reports.append(report)
    return _run_elsewhere(gm, args, where)


def _elsewhere(config: Config, reason: str, eager: bool = False) -> str:
    """Choose where a graph runs that is no update. Raises CaptureError if nowhere."""
    if config.fallback == "error":
        raise CaptureError(f"{reason} (options={{'fallback': 'error'}} was given)")
    where = "eager" if eager or not compat.INDUCTOR.available() else config.fallback
    log.info("a graph goes to %s: %s", where, reason)
    return where


def _without_symbols(args: Sequence[Any], where: str) -> None:
    """Raise TraceAgain if Inductor would get floats as arguments, which it rejects."""
    floats = any(isinstance(x, torch.SymFloat) for x in args)
    if where != "eager" and floats and compat.has_symbols():
        raise compat.TraceAgain(f"{where} takes no floats as arguments")


def _run_elsewhere(
    gm: GraphModule, args: Sequence[Any], where: str
) -> Callable[..., Any]:
    if where == "eager":
        return as_eager(gm)
    return compat.inductor(gm, args)


def _verified(gm: GraphModule, args: Sequence[Any], step: Callable[[], Any]) -> Any:
    """Run a step and eager beside it on clones; raise at the first bit that differs."""
    statics, expected_args, expected = replay(gm, args)
    result = step()
    pairs = [(name, getattr(gm, name), want) for name, want in statics.items()]
    pairs += [
        (f"argument {i}", got, want)
        for i, (got, want) in enumerate(zip(args, expected_args, strict=True))
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
