"""Repeat the last call of a led step in one call of C, which compares and launches.

A `SingleCall` is made of a `SteadyCall` without calls around its step. If the step has
one kernel on the CPU, no bytecode runs between the first comparison of a lane and the
end of the launch. So a signal handler runs before all comparisons of lanes and tensors,
or after the step. Any other step is done by the steady call, after one call of C that
compares what is around the step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..compat.facts import ENTRY, Fact, attributes, first_untrue, result
from ..compat.profiling import profiled
from ..handlers import reraise
from ..runtime.binding import Binding
from ..runtime.guards.facts import in_c
from .comparison import CannotRepeat, Comparison, need
from .steady import SteadyCall
from .tail_arguments import NO_TAIL_ARGUMENTS

_CALL = functools.partial.__call__


class SingleCall:
    """One step of an optimizer; a call returns False if nothing was done.

    `steady`: the call that it repeats. `lock`: admits one thread at a time. `wanted`:
    the grad mode of the step, None if it keeps the caller's. `calls`: calls of C that
    do the step. Each returns 0 or None, or another number if the step must not go on. A
    negative one comes after the launch. `launches`: false if they compare only what is
    around the step, which the steady call does then.
    """

    def __init__(
        self,
        steady: SteadyCall,
        optimizer: Any,
        lock: Any,
        wanted: bool | None,
        calls: Sequence[Any],
        compared: Comparison,
        launches: bool,
    ) -> None:
        self.held, self.kind = vars(optimizer), type(optimizer)
        self.lock, self.wanted = lock, wanted
        self._calls, self._compared, self._launches = calls, compared, launches
        self.steady = steady

    def __call__(self, optimizer: Any) -> bool:
        """Do one step, if it repeats the last one."""
        if vars(optimizer) is not self.held or type(optimizer) is not self.kind:
            return False
        before, wanted, compared = torch.is_grad_enabled(), self.wanted, self._compared
        with self.lock:
            compat.GRAD_SWITCH(before if wanted is None else wanted)
            try:
                found: Any = next(filter(None, map(_CALL, self._calls)), 0)
                if not self._launches:
                    return not found and self.steady.step(optimizer)
                if found < 0:
                    self.steady.count_versions(compared.grads)
                return bool(found <= 0)
            finally:
                compat.GRAD_SWITCH(before)
                compared.forget()


def single_call(
    steady: SteadyCall,
    optimizer: Any,
    lock: Any,
    wanted: bool | None,
    around: Sequence[Fact],
    home: Any,
) -> SingleCall | None:
    """Return the single call that repeats a steady one, which C compares.

    `around`: facts that the callers of the step compare. `home`: has the steady call.
    None where one call of C cannot do the step.
    """
    try:
        launcher, compared = steady.launcher, steady.in_c
        bound, count = launcher.bound, launcher.guard.count
        helper, threads = bound.helper, torch.get_num_threads()
        need(steady.call.tail_arguments is NO_TAIL_ARGUMENTS, helper, compared, count)
        facts = [
            *around,
            *attributes(home, "calls"),
            *(
                Fact(ENTRY, home.calls, k, x)
                for k, x in home.calls.items()
                if x is steady
            ),
        ]
        launches = bound.launches(threads) if _in_c(bound) and not profiled() else []
        if launches:
            facts += [result(threads, torch.get_num_threads), result(False, profiled)]
            facts += attributes(bound, "_launches")
        need(first_untrue(facts) == 0)
    except (AttributeError, KeyError, TypeError, CannotRepeat) as error:
        reraise(error)
        return None
    assert helper is not None
    assert compared is not None
    begin = steady.leader.pending.beginning()
    calls: list[Any] = [in_c(helper, facts)]
    if launches:
        calls += [*compared.calls, begin, *launches, count]
    return SingleCall(steady, optimizer, lock, wanted, calls, compared, bool(launches))


def _in_c(bound: Binding) -> bool:
    """Are all launches of a binding calls of C, which need no memory?"""
    return bound.on_cpu and bound.plan.simple
