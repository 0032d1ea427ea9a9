"""Repeat the last call of a led step in one call of C, which compares and launches.

A `SingleCall` is made of a `SteadyCall`. If the step has one kernel on the CPU, no
bytecode runs between the first comparison of a lane and the end of the launch. So a
signal handler runs before all comparisons of lanes and tensors, or after the step. Any
other step is done by the steady call, after one call of C that compares what is around
the step. A tail adds its first launch, and what compares its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..compat.facts import ENTRY, Fact, attributes, first_untrue, result
from ..compat.profiling import profiled
from ..runtime.binding import Binding
from ..runtime.guards.facts import in_c
from ..runtime.undo import CALL
from .comparison import Comparison, if_repeatable, need, there
from .steady import SteadyCall
from .tail_arguments import NO_TAIL_ARGUMENTS, TailArguments


class SingleCall:
    """One step of an optimizer; a call returns False if nothing was done.

    `steady`: the call that it repeats. `lock`: admits one thread at a time. `wanted`:
    the grad mode of the step, None if it keeps the caller's. `compares` and `launches`:
    calls of C that do the step. Each returns 0 or None, or another number if the step
    must not go on. A negative one comes after the launch. Without `launches`, the
    steady call does the step, and `compares` covers what is around it.
    """

    def __init__(
        self,
        steady: SteadyCall,
        optimizer: Any,
        lock: Any,
        wanted: bool | None,
        compares: Sequence[Any],
        launches: Sequence[Any],
        compared: Comparison,
    ) -> None:
        self.held, self.kind = vars(optimizer), type(optimizer)
        self.lock, self.wanted = lock, wanted
        self._compares, self.launches, self.compared = compares, launches, compared
        self.steady = steady

    def __call__(self, optimizer: Any) -> bool:
        """Do one step, if it repeats the last one."""
        if vars(optimizer) is not self.held or type(optimizer) is not self.kind:
            return False
        before, wanted, compared = torch.is_grad_enabled(), self.wanted, self.compared
        with self.lock:
            try:
                compat.GRAD_SWITCH(before if wanted is None else wanted)
                if not self.launches:
                    found: Any = next(filter(None, map(CALL, self._compares)), 0)
                    return not found and self.steady.step(optimizer)
                return self.launched()
            finally:
                compat.GRAD_SWITCH(before)
                compared.forget()

    def launched(self, more: Sequence[Any] = (), launches: Sequence[Any] = ()) -> bool:
        """Compare and launch. If a step of this optimizer ran in between, which an
        object's end may do, return False with nothing launched.

        `more`: comparisons after the step's. `launches`: launches before the step's.
        """
        pending, call = self.steady.leader.pending, object()
        calls = *pending.within(call, self._compares, more), *launches, *self.launches
        try:
            found: Any = next(filter(None, map(CALL, calls)), 0)
        except ValueError:
            if pending.is_last(call):
                raise
            return False
        if found < 0:
            self.steady.count_versions(self.compared.grads)
            if self.compared.given is not None:
                self.compared.given.count_in_python()
        return bool(found <= 0)


@if_repeatable
def single_call(
    steady: SteadyCall,
    optimizer: Any,
    lock: Any,
    wanted: bool | None,
    around: Sequence[Fact],
    tail_arguments: TailArguments = NO_TAIL_ARGUMENTS,
    reads: bool = True,
) -> SingleCall:
    """Return the single call that repeats a steady one, which C compares.

    `around`: facts that the callers of the step compare. `tail_arguments`: those of the
    call. Without `reads`, the caller fills the list of parts of gradients. None where
    one call of C cannot do the step.
    """
    launcher, compared, home = steady.launcher, there(steady.in_c), steady.leader.steady
    bound, count = launcher.bound, there(launcher.guard.count)
    helper, threads = there(bound.helper), torch.get_num_threads()
    need(steady.call.tail_arguments is tail_arguments)
    own = [Fact(ENTRY, home.calls, k, x) for k, x in home.calls.items() if x is steady]
    facts = [*around, *attributes(home, "calls"), *own]
    launches: list[Any] = []
    if _in_c(bound) and not profiled():
        launches = bound.launches(threads)
    if launches:
        facts += [result(threads, torch.get_num_threads), result(False, profiled)]
        facts += attributes(bound, "_launches", "allocated")
        facts += attributes(bound.temps, "arena")
    need(first_untrue(facts) == 0)
    compares: list[Any] = [in_c(helper, facts)]
    if launches:
        read = None if reads or compared.given is None else compared.given.read
        compares += [x for x in compared.calls if x is not read]
        launches = [*launches, count]
        if compared.given is not None:
            launches.append(compared.given.counted)
    return SingleCall(steady, optimizer, lock, wanted, compares, launches, compared)


def _in_c(bound: Binding) -> bool:
    """Are all launches of a binding calls of C, which need no memory, or a kept one?"""
    if not bound.on_cpu or bound.plan.simple:
        return bound.on_cpu
    temps = bound.temps
    kept = temps.arena is not None or not temps.parts
    fixed = not bound.allocated and not bound.plan.host_results
    return kept and fixed and bound.plan.lean
