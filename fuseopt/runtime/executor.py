"""Run the steps of a plan, one after another: kernels, runs of kernels, ATen calls.

`in_order` runs them on the tensors of a call; its caller decides how a kernel is
started. `whole` runs all of them or none, and undoes what an error interrupts. An
`Executor` runs whole plans: `DirectExecutor` launches each kernel, `cudagraphs.Replays`
replays captured graphs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import torch

from ..compat.profiling import profiled, profiler_range
from ..ir.graph import Batch, Extern, Kernel, Run, Step
from .binding import Binding, bind
from .chained_batches import ChainedBatches
from .cpp.table import KernelTable
from .memory import Memory
from .plan import Plan
from .probes import circumstances
from .undo import at_once

Calls = Sequence[Callable[[], object]]
#: Runs calls that need not wait for each other.
Beside = Callable[[Calls, Memory], None]


class Executor(Protocol):
    """Interface that runs one plan, outside of any capture of the user's."""

    def run(
        self,
        bound: Binding,
        tensors: Sequence[torch.Tensor],
        threads: int,
        then: Calls = (),
    ) -> Memory | None:
        """Run the plan on the tensors of a call. Return the memory of its results.

        `tensors` may be empty where a plan is lean and no device is used. `then` are C
        calls that follow it, with nothing in between where that is possible.
        """


class Program:
    """Plan, its executor, and its binding to the tensors that it last ran on, None
    before the first run.
    """

    def __init__(self, plan: Plan, executor: Executor) -> None:
        self.plan = plan
        self.executor = executor
        self.bound: Binding | None = None
        #: true if a call can go without its tensors, where none of them has changed
        self.lean = False

    def bind(self, tensors: Sequence[torch.Tensor]) -> Binding:
        """Bind the plan to the layouts of tensors; if that fails, `bound` stays."""
        self.bound = bind(self.plan, tensors, self.bound)
        self.lean = self.plan.lean and not self.bound.undoes_by_tensors
        return self.bound


class DirectExecutor:
    """Executor that launches each kernel."""

    def run(
        self,
        bound: Binding,
        tensors: Sequence[torch.Tensor],
        threads: int,
        then: Calls = (),
    ) -> Memory | None:
        """See Executor."""
        return whole(bound, tensors, threads, then)


def starting(bound: Binding, threads: int) -> Callable[[KernelTable], None]:
    """Return a function that starts a kernel, in a profiler's range with its name."""
    if profiled():
        return functools.partial(_shown, bound, threads)
    return lambda table: table.launch(threads)


def _shown(bound: Binding, threads: int, table: KernelTable) -> None:
    """Start a kernel in a profiler's range with its name."""
    (name,) = (name for name, x in bound.tables.every.items() if x is table)
    with profiler_range(bound.shown(name)):
        table.launch(threads)


def prepared(bound: Binding, tensors: Sequence[torch.Tensor]) -> tuple[Memory, object]:
    """Allocate the memory of a plan of kernels alone. Return it, and the arena. The
    caller must keep both until the last kernel has ended.
    """
    memory = Memory(bound.memory, tensors, bound.addresses, bound.numbers or ())
    memory.arena = arena = bound.temps.take(bound.addresses)
    memory.allocate(bound.allocated)
    return memory, arena


def in_order(
    bound: Binding,
    tensors: Sequence[torch.Tensor],
    launch: Callable[[KernelTable], None],
    temps: Sequence[int] | None = None,
    beside: Beside | None = None,
) -> Memory | None:
    """Run the steps of a plan; return the memory of the call, None if it needs none.

    All temps that no ATen call returns are allocated before the first kernel starts:
    those among `temps`, or all of the plan. `beside(branches, memory)` runs branches of
    ATen calls at one time; without it they run in order.
    """
    plan, tables = bound.plan, bound.tables.every
    if plan.simple:
        for table in tables.values():
            launch(table)
        return None
    memory, arena = _ready(bound, tensors, bound.allocated if temps is None else temps)
    with torch.no_grad():
        if beside is not None and plan.schedule.branches:
            _with_branches(bound, memory, launch, beside)
        else:
            _run(bound, memory, launch, plan.schedule.steps)
    del arena
    return memory


def whole(
    bound: Binding, tensors: Sequence[torch.Tensor], threads: int, then: Calls
) -> Memory | None:
    """Run a plan and what comes after it, all of it or nothing: an error restores what
    was written. Return the memory of the call, None if it needs none.
    """
    if bound.device_launches is not None and bound.device_launches.alone:
        bound.device_launches.run(threads, then)
        return None
    plan, launch = bound.plan, starting(bound, threads)
    steps, risk = plan.schedule.steps, bound.risk
    if plan.simple and not bound.interpreted:
        (table,) = bound.tables.every.values()
        launch(table)
        at_once(then)
        return None
    if bound.on_cpu:
        memory, arena = prepared(bound, tensors)
        at_once([*bound.launches(threads), *then])
        del arena
        return memory
    memory, arena = _ready(bound, tensors, bound.allocated)
    if plan.in_c and not profiled():
        calls = _in_c(bound, memory, threads)
        if calls is not None:
            at_once([*calls, *then])
            del arena
            return memory
    with torch.no_grad(), bound.undo_written(memory) as undo:
        _run(bound, memory, launch, steps[: risk.steps])
        rest = [s for s in steps[risk.steps :] if isinstance(s, (Kernel, Run))]
        last = [bound.calls(step, threads) for step in rest]
        at_once([*chain.from_iterable(last), undo.done, *then])
    del arena
    return memory


def _in_c(bound: Binding, memory: Memory, threads: int) -> Calls | None:
    """Return calls of C that run a plan of kernels and chains, which cannot fail.

    Returns None if a chain may not run now. They are those of the last call if nothing
    that they depend on has changed.
    """
    if memory.circumstances is None:
        memory.circumstances = circumstances()
    numbers = [memory.numbers[i] for i in bound.plan.scales]
    now = (memory.circumstances, threads, numbers, bound.taking)
    known = bound.in_c
    if known is not None and known[0] is memory.arena and known[1] == now:
        return known[2]
    bound.in_c = None
    plan = bound.plan
    calls: list[Callable[[], object]] = []
    at = 0
    while at < len(plan.schedule.steps):
        step = plan.schedule.steps[at]
        if isinstance(step, (Kernel, Run)):
            calls += bound.calls(step, threads)
            at += 1
            continue
        if isinstance(step, Extern):
            at += 1
            continue
        row = plan.series[at]
        assert isinstance(row, ChainedBatches), "a plan in C has chains alone"
        found = row.calls(memory)
        if found is None:
            return None
        calls += found
        at += row.count
    if bound.temps.keeps:
        bound.in_c = memory.arena, now, calls
    return calls


def _ready(
    bound: Binding, tensors: Sequence[torch.Tensor], temps: Sequence[int]
) -> tuple[Memory, object]:
    """Make the memory of a call, and send its known addresses to devices."""
    memory = Memory(bound.memory, tensors, bound.addresses, bound.numbers or ())
    memory.arena = arena = bound.temps.take(bound.addresses)
    memory.allocate(temps)
    # the device gets known addresses before the first kernel
    for device_table in bound.tables.on_devices:
        device_table.refresh()
    return memory, arena


def _with_branches(
    bound: Binding,
    memory: Memory,
    launch: Callable[[KernelTable], None],
    beside: Beside,
) -> None:
    """Run steps one after another, but branches at one time."""
    schedule = bound.plan.schedule
    at = 0
    while at < len(schedule.steps):
        branches = schedule.branches.get(at, ((at,),))
        parts = [[schedule.steps[i] for i in branch] for branch in branches]
        calls = [functools.partial(_run, bound, memory, launch, x) for x in parts]
        if len(calls) > 1:
            beside(calls, memory)
        else:
            calls[0]()
        at += sum(map(len, branches))


def _run(
    bound: Binding,
    memory: Memory,
    launch: Callable[[KernelTable], None],
    steps: Sequence[Step],
) -> None:
    """Run steps one after another: the first ones of the plan, or those of a branch."""
    tables, externs = bound.tables.every, bound.plan.externs
    constants = bound.plan.constants
    batches = bound.plan.batches
    whole = steps[:1] == bound.plan.schedule.steps[:1] and not profiled()
    series = bound.plan.series if whole else {}
    done = 0
    for i, step in enumerate(steps):
        if i in series:
            done = i + series[i].run(memory)
        if i < done:
            continue
        if isinstance(step, (Kernel, Run)):
            launch(tables[step.name])
        elif isinstance(step, Batch):
            batches[step.externs[0].payload].run(memory)
        elif step.payload not in constants:
            memory.run(externs[step.payload])
