"""Compile graphs with one node, a function of tensors, without Dynamo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..capture.fx.interpreter import OWN
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.timing import Clock
from ..config import Config
from ..inputs.keys import LanesDiffer
from ..inputs.policy import RefusingPolicy, follow
from ..runtime.commit import Pending
from ..runtime.executor import Program
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep


def step_of(
    function: Callable[..., None],
    names: Sequence[str],
    args: Sequence[Any],
    config: Config,
    on_report: Callable[[Report], None],
    instead: str = "The tail runs in pieces.",
    parts: slice = slice(0),
    changed: Callable[..., None] = follow,
    pending: Pending | None = None,
) -> CompiledStep:
    """Return the step that calls `function`, which writes to its arguments.

    `names` are the names of these. `parts`: those that lie in one tensor. `changed`:
    see RefusingPolicy. An error inside fuseopt is reported, with the text `instead` on
    what happens, and raised as LanesDiffer. The capture of the graph runs the function
    on tensors without contents.
    """
    setattr(function, OWN, True)
    graph = Graph()
    names = [f"{name}{k}" for k, name in enumerate(names)]
    graph.call_function(function, tuple(map(graph.placeholder, names)))
    graph.output(())
    gm = GraphModule(torch.nn.Module(), graph)
    replan = pipeline.replanner(gm, config, on_report, Clock())

    def plan(args: Sequence[Any]) -> Program:
        # the plan may take parts of a tensor as separate ones
        separate = [*args]
        separate[parts] = map(torch.empty_like, args[parts])
        return replan(separate)

    try:
        program = plan(args)
    except Exception as error:
        if not internal_errors.is_mishap(error):
            raise
        message = internal_errors.report(error, gm, args, config, instead)
        raise LanesDiffer(message) from error
    source = GraphTensors(gm, program.plan.captured.tensor_args)
    policy = RefusingPolicy("gradients share memory", changed)
    return CompiledStep(source, program, plan, policy, None, pending)
