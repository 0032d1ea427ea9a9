"""Repeat the last call of a led step, where only gradients and numbers differ from it.

A call that changed nothing but tensors leaves a `SteadyCall`. It holds what the driver
looks up in each call: the trace, the program, the records. The next call makes the
driver's comparisons in the driver's order, in a few functions. If a comparison finds
anything else, nothing has been written, and the driver does the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

from .. import compat
from ..errors import FuseoptError
from ..handlers import reraise
from ..inputs.lane_matcher import LaneMatcher, RecentLanes, first_param
from ..inputs.pending_gradients import PendingGradients
from ..inputs.state_guard import StateGuard
from ..ir.expressions import Item
from ..runtime.binding import Binding
from ..runtime.commit import Pending
from ..runtime.guards.tensors import TensorGuard
from .source import NOTHING, StepCall
from .step import LedStep
from .tail_arguments import NO_TAIL_ARGUMENTS, TailArguments
from .traces import Trace
from .writes import LaneNumbers


class Differs(FuseoptError):
    """The driver must do a call, which has written nothing."""


class Leader(Protocol):
    """The driver, as a steady call uses it."""

    completed: bool  #: True if the last call ended normally
    call: StepCall
    pending: Pending
    state_guard: StateGuard
    recent: RecentLanes
    trace: Trace | None
    stepped: LaneNumbers | None


class Launcher:
    """The function that Dynamo's code calls in place of the graph in a steady call.

    The code refers to it, so it does not refer to the code. `guard`: compares the
    step's tensors.
    """

    def __init__(
        self, graph: LedStep, call: StepCall, bound: Binding, guard: TensorGuard
    ) -> None:
        program = graph.program
        assert program is not None
        self.bound, self.guard = bound, guard
        self.step, self.source = program.step, program.source
        shared = call.tail_arguments.shared
        #: the arguments after Dynamo's
        self._beside = (*(graph.given or ()), *shared) if graph.completed else ()
        captured = bound.plan.captured
        numbers = captured.graph.numbers
        self._evaluate = captured.evaluate if numbers else None
        self._reads_tensors = any(isinstance(x, Item) for x in numbers)
        #: the last arguments of which numbers were computed
        self._known: Sequence[Any] = (None,)

    @property
    def is_bound(self) -> bool:
        """Is the step still bound to the same tables, and compared by `guard`?"""
        bound = self.bound
        return self.step.program.bound is bound and bound.guard is self.guard

    def __call__(self, *args: Any) -> Any:
        args = *args, *self._beside
        verdict, alive = self.source.compare_others(self.guard, args)
        if verdict:
            raise Differs
        if self._evaluate is not None and not self._same_numbers(args):
            find = functools.partial(self.source.tensor, args)
            self.bound.fill(self._evaluate(args, find))
            self._known = args
        return self.step.defer(self.bound, args, [], alive)

    def _same_numbers(self, args: Sequence[Any]) -> bool:
        """Are all numbers those of the last call, since the arguments are?"""
        known = self._known
        same = len(args) == len(known) and all(map(is_, args, known))
        return same and not self._reads_tensors


class SteadyCall:
    """The objects of a call of a led step, for the next call; see `SteadyCalls`."""

    def __init__(
        self,
        leader: Leader,
        matcher: LaneMatcher,
        trace: Trace,
        graph: LedStep,
        launcher: Launcher,
        direct: tuple[Callable[[], bool], Callable[[Any], Any]],
    ) -> None:
        self.leader, self.call = leader, leader.call
        self.matcher, self.present = matcher, leader.call.found.present
        self.trace, self.graph, self.launcher = trace, graph, launcher
        self.compiled, self.count = trace.compiled, leader.state_guard.count
        self.fits, self.code = direct

    def step(
        self,
        optimizer: Any,
        given: PendingGradients | None,
        tail_arguments: TailArguments,
    ) -> bool:
        """Do one step; return False if nothing was done, and the driver must do it.

        The arguments are those of the driver's `step`.
        """
        leader, call, launcher = self.leader, self.call, self.launcher
        guard, pending = leader.state_guard, leader.pending
        if (
            tail_arguments is not call.tail_arguments
            or guard.count != self.count
            or not leader.completed
            or not launcher.is_bound
            or pending.refreshing
        ):
            return False
        found = self.matcher.repeat(optimizer, given)
        if found is None or found.present != self.present:
            return False
        if found.compared is not launcher.guard:
            return False
        leader.call, leader.completed = call, False
        call.optimizer, call.found, call.given = optimizer, found, given
        try:
            if not found.rest_same:
                guard.compare(optimizer)
                if guard.count != self.count or not guard.moved <= self.graph.moving:
                    raise Differs
            shadow = self.trace.refreshed(optimizer, guard.epoch)
            if self.trace.compiled is not self.compiled or not self.fits():
                raise Differs
            shadow.clean = False
            begun = pending.start(tail_arguments.launches_before)
            self.code(shadow.stand_in)
            if pending.kept is None or shadow.changed():
                raise Differs
        except Exception as error:
            # the driver meets the same error, and reports it
            reraise(error)
            leader.completed = True
            return False
        else:
            pending.finish(begun)
            shadow.clean = leader.completed = True
            return True
        finally:
            call.optimizer, call.found, call.given = None, NOTHING, None
            pending.drop()


class SteadyCalls:
    """The steady forms of a driver's last calls, by the first parameter of each."""

    def __init__(self) -> None:
        self.calls: dict[int, SteadyCall] = {}
        # of earlier calls, while one is under way
        self._earlier: dict[int, SteadyCall] = {}

    def clear(self) -> None:
        """Forget all calls."""
        self.calls, self._earlier = {}, {}

    def repeat(
        self,
        optimizer: Any,
        given: PendingGradients | None = None,
        tail_arguments: TailArguments = NO_TAIL_ARGUMENTS,
    ) -> bool:
        """Do one step like the last one with this first parameter.

        The arguments are those of the driver's `step`. Returns False if nothing was
        done.
        """
        key = id(first_param(optimizer))
        steady = self.calls.pop(key, None)
        if steady is None or not steady.step(optimizer, given, tail_arguments):
            return False
        self.calls[key] = steady
        return True

    def begin(self) -> None:
        """Begin a call of the driver."""
        self._earlier, self.calls = self.calls, {}

    def end(self, leader: Leader) -> None:
        """End a call of the driver, which wrote nothing but tensors."""
        call = leader.call
        if call.compiled_nothing and not call.surveyed:
            steady = _steady(leader)
            self.calls = self._earlier
            if steady is not None:
                self.calls[id(first_param(call.optimizer))] = steady
        self._earlier = {}


def _steady(leader: Leader) -> SteadyCall | None:
    """Return the steady form of the call that `leader` ends.

    Returns None for a step that needs more than launches of kernels, and while Python
    compares its lanes.
    """
    call, trace, graph = leader.call, leader.trace, leader.stepped
    guard, matcher = call.found.guard, leader.recent.every[-1]
    if guard is None or trace is None or not isinstance(graph, LedStep):
        return None
    program = graph.program
    if matcher.alternates or graph.known != leader.state_guard.count:
        return None
    if trace.steps != [graph] or program is None or program.counted:
        return None
    step = program.step
    bound, plan = step.program.bound, step.program.plan
    if bound is None or bound.guard is None or guard.tensors is not bound.guard:
        return None
    if not (plan.lean and bound.waits) or plan.captured.result != () or bound.infers:
        return None
    if step.verify is not None or step.instead is not None or not bound.guard.count:
        return None
    if not isinstance(trace.compiled, compat.DirectDynamoCall):
        return None
    launcher = Launcher(graph, call, bound, bound.guard)
    direct = trace.compiled.direct(trace.stand_in, launcher)
    if direct is None:
        return None
    return SteadyCall(leader, matcher, trace, graph, launcher, direct)
