"""Backend for Dynamo's graphs of models: each graph becomes a led step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.fx import GraphModule

from .. import compat
from ..compiler.entry import BACKEND
from ..compiler.partition import decide
from ..compiler.reference import Reference
from ..inputs.keys import LanesDiffer
from .step import PATIENCE, LedStep
from .task import Owner, Task
from .traces import Trace


class TracedOwner(Owner, Protocol):
    """An Owner whose models Dynamo traces."""

    trace: Trace | None
    task: Task


def check_update(gm: GraphModule, args: Sequence[Any]) -> None:
    """Raise LanesDiffer for a graph that must not run, or is more than an update."""
    refused = compat.refused_graph(gm)
    if refused:
        raise LanesDiffer(refused)
    decision = decide(gm, list(args), compat.traces_step())
    if decision.parts or decision.whole != "update":
        raise LanesDiffer(f"its graph is more than an update: {decision.why}")


class BranchesOnState(LanesDiffer):
    """The step branches on a number of a lane, so such lanes are of different kinds."""

    constants_help = False


def backend_of(traced: TracedOwner) -> Callable[..., Any]:
    """Return a backend for Dynamo that adds a LedStep for each graph to the trace."""
    # Dynamo keeps a reference to each backend that it has received
    owner = weakref.ref(traced)

    @compat.refusals_pass(BACKEND)
    def lead(gm: GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
        traced = owner()
        assert traced is not None
        assert traced.trace is not None
        if len(traced.trace.steps) >= PATIENCE:
            raise LanesDiffer("Dynamo traces its step too often")
        if not compat.stay_symbolic(gm, frozenset(traced.models.counted)):
            raise BranchesOnState("it branches on a number in its state")
        check_update(gm, args)
        traced.call.compiled_nothing = False
        step = LedStep(traced, traced.task, gm)
        traced.trace.steps.append(step)
        return Reference(step)

    lead._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
    return lead
