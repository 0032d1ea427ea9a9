"""Repeat the last call of a tail: one call of C compares its options, and launches it.

A `SingleTail` is made of a call of a `LedTail` that repeated the call before. It
compares, as facts, what `Tail` and `SingleGraph` compare in such a call. If the step
has a `SingleCall`, C does both launches after the step's comparisons. If not, the led
tail repeats its last call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .. import compat
from ..compat.facts import ENTRY, LENGTH, Fact, attributes, first_untrue, result
from ..compat.profiling import profiled
from ..compiler.session import session
from ..inputs.change import SAME
from ..inputs.tails import TailRecord
from ..isolate.quick import TRACES
from ..replicate.comparison import if_repeatable, need, there
from ..replicate.single_call import SingleCall, single_call
from ..runtime.guards.facts import in_c
from .led import LedTail
from .totals import NormLaunch

Tensors = list[torch.Tensor]


class FirstLaunch:
    """The first launch of a tail, in calls of C. `facts` hold while it can be done.

    `norm_launch`: that of the last call, None if the step is the first launch. Raises
    CannotRepeat if Python must prepare it.
    """

    def __init__(self, norm_launch: NormLaunch) -> None:
        self.graph = graph = norm_launch.graph
        self.norm_launch = norm_launch
        self.launches: Sequence[Any] = ()
        self.facts: list[Fact] = []
        if graph is None:
            return
        linked = there(graph.linked)
        need(graph.norm_launch() is norm_launch)
        self._linked, bound, temps = linked, linked.bound, linked.bound.temps
        need(graph.step.program.bound is bound, bound.guard is linked.guard)
        need(bound.on_cpu, linked.other.comparable, not profiled())
        need(temps.arena is not None or not temps.parts)
        self.launches = bound.launches(torch.get_num_threads())
        self.facts = [
            *attributes(graph, "linked", "norm_launch", "fresh", "step"),
            *attributes(graph.step, "program"),
            *attributes(graph.step.program, "bound"),
            *attributes(bound, "guard", "_launches"),
            *attributes(temps, "arena"),
            *attributes(linked.other, "comparable"),
        ]

    def prepared(self) -> tuple[Tensors, list[Any]]:
        """Return new results of a call, and the call of C that compares its tensors."""
        if self.graph is None:
            return [], []
        results, linked = self.graph.fresh.take(), self._linked
        compare = functools.partial(linked.compare, [*results, *linked.rest])
        return results, [compare]

    def end(self, results: Tensors) -> None:
        """Take the results of a call that was done."""
        if self.graph is not None:
            self.graph.results = results


class SingleTail:
    """The call of a tail that repeats the one of `record`.

    `facts`: hold in that call, around the step. `around`: compares them in C. `lock`:
    the tail's, which the caller holds.
    """

    def __init__(
        self, record: TailRecord, led: LedTail, facts: list[Fact], lock: Any
    ) -> None:
        self.record, self.led, self.facts, self.lock = record, led, facts, lock
        self._around = in_c(there(led.helper), facts)
        self._single: tuple[SingleCall, FirstLaunch] | None = None

    def __call__(self, tail: Any, average: bool) -> tuple[torch.Tensor, ...] | None:
        """Do one tail. Return the results of `LedTail.step`, or None if nothing was
        done.
        """
        record = self.record
        if average is not record.average or not record.same_scale(tail):
            return None
        recorded = torch.is_grad_enabled()
        compat.GRAD_SWITCH(False)
        try:
            if self._single is not None and self._launched(*self._single):
                return self.led.results(self._single[1].norm_launch)
            if self._around():
                return None
            results = self.led.again()
            if results is not None:
                self._learn()
            return results
        finally:
            compat.GRAD_SWITCH(recorded)

    def _launched(self, single: SingleCall, first: FirstLaunch) -> bool:
        """Do one tail in one call of C, if it repeats the last one."""
        try:
            results, compares = first.prepared()
            done = single.launched(compares, first.launches)
            if done:
                first.end(results)
            return done
        finally:
            single.compared.forget()

    @if_repeatable
    def _learn(self) -> None:
        """Make the single call that repeats the last one, if its step was steady."""
        if self.led.last is None:
            return
        leader, tail_arguments, norm_launch = self.led.last
        steady = next(reversed(leader.steady.calls.values()), None)
        if steady is None or steady.in_c is None or not steady.attempts.due():
            return
        self._single = None
        first = FirstLaunch(norm_launch)
        facts = [*self.facts, *attributes(leader, "lanes", "steady"), *first.facts]
        arguments = steady, self.led.optimizer, self.lock, False, facts
        single = single_call(*arguments, tail_arguments)
        if single is not None and single.launches:
            self._single = single, first


@if_repeatable
def single_tail(tail: Any, record: TailRecord) -> SingleTail:
    """Return what repeats the call of a tail that has repeated the one of `record`.

    None where C cannot compare what is around the step.
    """
    fused = tail._fused
    led = fused.led
    need(led is not None and led.last is not None and led.only_leads)
    need(session.deferred is None, compat.stance() in TRACES)
    optimizer, (structure,) = led.optimizer, fused.structures
    groups = optimizer.param_groups
    facts = [
        result(vars(optimizer), vars, optimizer),
        result(type(optimizer), type, optimizer),
        *there(record.facts(tail)),
        *there(structure.facts()),
        *tail._lists.facts(),
        *compat.stance_facts(),
        *attributes(session, "deferred"),
        *attributes(tail, "_fused", "_steady"),
        *attributes(fused, "led", "whole"),
        *attributes(fused.whole, "refusal"),
        *attributes(led, "last", "last_call"),
        Fact(ENTRY, vars(led.last_call), "ended", True),
        *attributes(optimizer, "state", "param_groups"),
        Fact(LENGTH, groups, len(groups), None),
    ]
    # a signal handler may have changed anything before the facts
    need(compat.stance() in TRACES, not fused.refusal, tail._steady is record)
    need(record.compare(tail, record.average) is SAME)
    need(structure.compare(optimizer) is SAME, first_untrue(facts) == 0)
    return SingleTail(record, led, facts, tail._lock)
