"""Repeat the last call of a led step in one call of C, which compares and launches.

A `SingleCall` is made of a `SteadyCall` whose step has one kernel on the CPU and no
calls around it. What the steady call compares are facts here (`compat/facts.py`), in
the same order. No bytecode runs between the last fact and the end of the launch. So a
signal handler runs before all comparisons of lanes and tensors, or after the step. The
only facts that run Python are Dynamo's guards, which come before those comparisons.

Dynamo's code is not called. It only reads the stand-in, whose contents are those of the
call before; so its graph would get the same arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..compat.facts import ENTRY, Fact, attributes, entry, first_untrue, items, result
from ..compat.profiling import profiled
from ..handlers import reraise
from ..inputs.contents import comparison_in_c
from ..inputs.lane_guard import DICTS
from ..runtime.guards.facts import in_c
from .steady import SteadyCall
from .tail_arguments import NO_TAIL_ARGUMENTS

_CALL = functools.partial.__call__


class SingleCall:
    """One step of an optimizer; a call returns False if nothing was done.

    `steady`: the call that it repeats. `lock`: admits one thread at a time. `wanted`:
    the grad mode of the step, None if it keeps the caller's. `calls`, `grads`: see
    `_calls`.
    """

    def __init__(
        self,
        steady: SteadyCall,
        optimizer: Any,
        lock: Any,
        wanted: bool | None,
        calls: Sequence[Any],
        grads: list[Any],
    ) -> None:
        self.held, self.kind = vars(optimizer), type(optimizer)
        self.lock, self.wanted = lock, wanted
        self._calls, self._grads, self._none = calls, grads, grads.copy()
        self.steady = steady

    def __call__(self, optimizer: Any) -> bool:
        """Do one step, if it repeats the last one."""
        if vars(optimizer) is not self.held or type(optimizer) is not self.kind:
            return False
        before, wanted, grads = torch.is_grad_enabled(), self.wanted, self._grads
        with self.lock:
            compat.GRAD_SWITCH(before if wanted is None else wanted)
            try:
                found: Any = next(filter(None, map(_CALL, self._calls)), 0)
                if found < 0:
                    self.steady.count_versions(grads)
                return bool(found <= 0)
            finally:
                compat.GRAD_SWITCH(before)
                grads[:] = self._none


def single_call(
    steady: SteadyCall,
    optimizer: Any,
    lock: Any,
    wanted: bool | None,
    around: Sequence[Fact],
    home: Any,
) -> SingleCall | None:
    """Return the single call that repeats a steady one, which has just been done.

    `around`: facts that the callers of the step compare. `home`: has the steady call.
    None where one call of C cannot do the step.
    """
    try:
        calls, grads = _calls(steady, optimizer, around, home)
    except (AttributeError, KeyError, TypeError, _CannotRepeat) as error:
        reraise(error)
        return None
    return SingleCall(steady, optimizer, lock, wanted, calls, grads)


class _CannotRepeat(Exception):
    """A step needs more than one call of C."""


def _need(*conditions: object) -> None:
    if not all(conditions):
        raise _CannotRepeat


def _calls(
    steady: SteadyCall, optimizer: Any, around: Sequence[Fact], home: Any
) -> tuple[list[Any], list[Any]]:
    """Return the calls of C that do the step, and the list that gets the gradients.

    Each returns 0 or None, or another number if the step must not go on. A negative one
    comes after the launch.
    """
    leader, launcher, lane_guard = steady.leader, steady.launcher, steady.lane_guard
    step, bound, guard = launcher.step, launcher.bound, launcher.guard
    shadow, state_guard, trace = steady.shadow, leader.state_guard, steady.trace
    helper, threads, compiled = bound.helper, torch.get_num_threads(), steady.compiled
    groups, state = optimizer.param_groups, optimizer.state
    lists = [group["params"] for group in groups]
    _need(type(groups) is list, type(state) in DICTS, {*map(type, lists)} == {list})
    _need(steady.call.tail_arguments is NO_TAIL_ARGUMENTS, bound.on_cpu)
    _need(bound.plan.simple, guard.count, launcher.repeats(shadow), not profiled())
    records = shadow.lanes.theirs, shadow.lanes.ours, shadow.plain.ours
    contents = [record.in_c for record in records]
    _need(*contents)
    assert isinstance(compiled, compat.DirectDynamoCall)
    guards = compiled.facts(trace.stand_in)
    _need(guards, helper, state_guard.struct.n)
    assert helper is not None
    assert guards is not None
    _need(lane_guard.tensors is guard, bound.taking is step.taking)
    _need(shadow.given[0] is state_guard.epoch, state_guard.count == steady.count)
    facts = [
        *around,
        *guards,
        # no Python runs from here on
        result(threads, torch.get_num_threads),
        result(False, profiled),
        *attributes(home, "calls"),
        *(Fact(ENTRY, home.calls, k, x) for k, x in home.calls.items() if x is steady),
        *attributes(optimizer, "state", "param_groups"),
        *items(groups),
        *(entry(group, "params") for group in groups),
        *attributes(leader, "last_call", "trace", "pending", "state_guard"),
        Fact(ENTRY, vars(leader.last_call), "ended", True),
        Fact(ENTRY, vars(leader.pending), "refreshing", False),
        Fact(ENTRY, vars(shadow), "clean", True),
        *attributes(state_guard, "count", "epoch"),
        *attributes(trace, "compiled", "shadow"),
        *attributes(shadow, "given", "lanes", "plain"),
        *attributes(step, "program", "taking", "pending", "instead"),
        *attributes(step.program, "bound"),
        *attributes(bound, "guard", "numbers", "taking", "_launches"),
        *attributes(guard, "count"),
        *attributes(lane_guard, "tensors"),
        *(result(1, same) for same in contents if same is not None),
        result(1, comparison_in_c(helper, state_guard.struct)),
    ]
    launches = bound.launches(threads)
    compare, grads = lane_guard.as_calls(vars(optimizer), lists, state)
    compared = in_c(helper, facts)
    _need(first_untrue(facts) == 0, compared() == 0)
    before = compared, *compare, launcher.compare_others()
    return [*before, *launches, guard.count], grads
