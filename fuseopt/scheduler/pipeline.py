"""The scheduler from top to bottom: Graph -> Schedule.

`schedule_kernels` fuses the graph into kernels. Each of `PASSES` then makes of one
schedule another; all of them do what the graph does, as `verifier.check_schedule` shows
of any. What the last pass gives is what runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir.graph import Graph, Schedule
from .batches import batch_products
from .branches import branch_out
from .epilogue import finish_early
from .kernels import schedule_kernels
from .memory import plan_memory
from .passes import Machine, Pass
from .prologue import begin_late
from .runs import join_runs
from .tiles import tile

PASSES = (
    Pass("finish", finish_early),
    Pass("begin", begin_late),
    Pass("runs", join_runs),
    Pass("tiles", tile),
    Pass("batches", batch_products),
    Pass("memory", plan_memory),
    Pass("branches", branch_out),
)


def schedule(
    graph: Graph,
    passed: Callable[[str, Schedule | None], None] = lambda name, result: None,
    machine: Machine | None = None,
) -> Schedule:
    """Fuse a captured step into as few kernels as the rules allow, and say how they run
    on a machine: one after another, if none is given.

    `passed(name, made)` is called when a pass has ended, with the schedule that it
    made; with None if there is none yet, or still the one before.
    """
    machine = machine or Machine()
    result = schedule_kernels(graph, lambda name: passed(name, None))
    passed("fusion", result)
    for scheduler_pass in PASSES:
        before, result = result, scheduler_pass.apply(graph, result, machine)
        passed(scheduler_pass.name, None if result is before else result)
    return result
