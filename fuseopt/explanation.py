"""Plan a step without running it or changing any tensor: `fuseopt.explain`."""

from __future__ import annotations

import contextlib
import copy
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from . import compat
from .compiler.dispatch import part_reports, values_of
from .compiler.entry import BACKEND, attach
from .compiler.partition import decide
from .compiler.pipeline import explain_graph
from .compiler.report import Report
from .compiler.timing import Clock
from .config import resolve
from .errors import NotAnOptimizer, UnsupportedInput
from .isolate.compile import packs
from .isolate.decorators import peel
from .isolate.unfused import unfuse
from .shards.placement import is_spread
from .tails.advice import tail_of


def explain(
    step: Callable[..., Any] | torch.optim.Optimizer,
    *args: Any,
    options: Mapping[str, Any] | None = None,
) -> Report:
    """Plan a step without running it or changing any tensor.

    `step`: an optimizer or its `step`, or a function of `args`. If no parameter has a
    gradient, the plan assumes that all have one. Returns the Report of the first graph;
    `build_seconds` is 0. Raises UnsupportedInput where Dynamo would never call a
    backend.
    """
    attach()
    config = resolve(None, options)
    given: Any = step.step if isinstance(step, torch.optim.Optimizer) else step
    if not callable(given):
        raise NotAnOptimizer(
            "fuseopt.explain takes an optimizer, its step or another function, not "
            f"{type(step).__name__!r}"
        )
    function: Callable[..., Any] = given
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.optim.Optimizer):
        if is_spread(owner):
            raise UnsupportedInput(
                "fuseopt plans steps of DTensors when they run. Run one step, and read "
                "fuseopt.reports()"
            )
        if packs(owner) is not None:
            raise UnsupportedInput(
                "fuseopt plans steps of packed state when they run. Run two steps, and "
                "read fuseopt.reports()"
            )
        twin = _twin(owner)
        unfuse(twin)
        reason = compat.disabled(twin)
        if reason:
            raise UnsupportedInput(reason)
        function = _unprofiled(getattr(twin, function.__name__))
    found: list[Report] = []

    class Planned(Exception):
        """Leaves the traced function before any of its code runs."""

    def planner(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        clock = Clock()
        decision = decide(gm, inputs, compat.traces_step())
        clock.lap("decide")
        update = [part for part in decision.parts if part.side == "update"]
        if decision.whole != "update":
            found.append(Report(fallback=decision.why))
        elif update:
            values = values_of(gm, inputs, update[0])
            report = explain_graph(update[0].gm, values, config)
            report.parts = part_reports(decision.parts, config.fallback)
            found.append(report)
        else:
            found.append(explain_graph(gm, list(inputs), config, clock))

        def leave(*_: Any) -> Any:
            raise Planned

        return leave

    # Dynamo then traces as it does for the backend
    planner._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
    with (
        compat.cuts_noted() as cuts,
        contextlib.suppress(Planned),
        compat.scalar_outputs(),
    ):
        torch.compile(function, backend=planner)(*args)
    if not found:
        raise UnsupportedInput(
            "Dynamo made no graph of this function; run it with "
            "TORCH_LOGS=graph_breaks to see why"
        )
    if not isinstance(owner, torch.optim.Optimizer):
        _warn_of_cuts(found[0], function, cuts)
    return found[0]


def _warn_of_cuts(report: Report, function: Any, cuts: Sequence[Any]) -> None:
    """Report where Dynamo ends the graph of a function, and which call replaces it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not cuts:
        return
    own = [x for x in cuts if (x.filename, x.name) == (code.co_filename, code.co_name)]
    lines = [f"{x.filename}:{x.lineno}: {x.line}" for x in own]
    report.cuts = list(dict.fromkeys(lines))
    report.instead = str(tail_of(function))


def _unprofiled(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound step without torch's profiler wrapper, of which Dynamo warns."""
    layers, _ = peel(getattr(step, "__func__", step))
    if layers and layers[0].__code__ is compat.PROFILED:
        return types.MethodType(layers[0].__wrapped__, step.__self__)  # type: ignore[attr-defined]
    return step


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Copy an optimizer over new tensors, with uninitialised contents."""
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
    made = copy.deepcopy(optimizer, memo)
    # the copy of a torch optimizer has groups and state, and no other attribute
    for name, value in vars(optimizer).items():
        if name not in vars(made) and not callable(value):
            try:
                vars(made)[name] = copy.deepcopy(value, memo)
            # such as a lock or a file: the step is traced, but never run
            except Exception:
                vars(made)[name] = value
    return made
