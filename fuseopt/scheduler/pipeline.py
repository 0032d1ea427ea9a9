"""The scheduler from top to bottom: from a Graph to a Schedule.

`schedule_kernels` fuses the graph into kernels. Each of `PASSES` then transforms the
schedule. Every schedule is equivalent to the graph, which `verifier.check_schedule`
proves for any of them. The last schedule runs.
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
    """Fuse a captured step into as few kernels as the rules allow, for a machine.

    Without a machine, kernels run one after another. `passed(name, made)` is called
    when a pass has ended, with its schedule. `made` is None if there is none yet, or if
    the pass changed nothing.
    """
    machine = machine or Machine()
    result = schedule_kernels(graph, lambda name: passed(name, None))
    passed("fusion", result)
    for scheduler_pass in PASSES:
        before, result = result, scheduler_pass.apply(graph, result, machine)
        passed(scheduler_pass.name, None if result is before else result)
    return result
