"""Repeat the last call of a led step, where only gradients and numbers differ from it.

A call that changed nothing but tensors leaves a `SteadyCall`. It holds what the driver
looks up in each call: the trace, the program, the records. The next call makes the
driver's comparisons in the driver's order, in a few functions. If a comparison finds
anything else, nothing has been written, and the driver does the call.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

import torch

from .. import compat
from ..compat.facts import ENTRY, Fact
from ..errors import FuseoptError
from ..handlers import reraise
from ..inputs.attempts import LONGEST, Attempts
from ..inputs.contents import Contents, holds
from ..inputs.lane_guard import LaneGuard
from ..inputs.lane_matcher import PARAMS, CallTensors, RecentLanes, first_param
from ..inputs.last_call import LastCall
from ..inputs.pending_gradients import PendingGradients
from ..inputs.state_guard import StateGuard
from ..ir.expressions import Item
from ..runtime.commit import Pending
from ..runtime.guards.facts import in_c
from ..shadow.optimizer import Shadow
from .comparison import Comparison, comparison
from .programs import Program
from .source import NOTHING, StepCall
from .step import LedStep
from .tail_arguments import NO_TAIL_ARGUMENTS, TailArguments
from .traces import Trace
from .writes import LaneNumbers


class Differs(FuseoptError):
    """The driver must do a call, which has written nothing."""


class Leader(Protocol):
    """The driver, as a steady call uses it."""

    last_call: LastCall
    call: StepCall
    pending: Pending
    state_guard: StateGuard
    recent: RecentLanes
    trace: Trace | None
    stepped: LaneNumbers | None
    steady: SteadyCalls


class Launcher:
    """The function that Dynamo's code calls in place of the graph in a steady call.

    The code refers to it, so it does not refer to the code. `guard`: compares the
    step's tensors. `found`: the tensors of the call.
    """

    def __init__(
        self, program: Program, found: CallTensors, beside: Sequence[Any]
    ) -> None:
        self.step, self.found = program.step, found
        bound = program.step.program.bound
        assert bound is not None
        assert bound.guard is not None
        self.bound, self.guard = bound, bound.guard
        source = program.source
        self._pick, self._places = source.pick, source.others
        self._tensor = source.tensor
        assert bound.guard.others is not None
        self._others = bound.guard.others
        self._beside = tuple(beside)  # the arguments after Dynamo's
        captured, self._lean = bound.plan.captured, program.step.program.lean
        numbers = captured.graph.numbers
        self._evaluate = captured.evaluate if numbers else None
        self._reads_tensors = any(isinstance(x, Item) for x in numbers)
        #: the last arguments of which numbers were computed
        self.known: Sequence[Any] = (None,)

    def __call__(self, *args: Any) -> Any:
        if self._beside:
            args = *args, *self._beside
        common = self._pick(args) if self._pick is not None else []
        if self._others(common, *self._places):
            raise Differs
        known = self.known
        same = len(args) == len(known) and all(map(is_, args, known))
        if self._evaluate is not None and (self._reads_tensors or not same):
            find = functools.partial(self._tensor, args)
            self.bound.fill(self._evaluate(args, find))
        self.known = args
        alive = common, self.found.grads
        tensors = [] if self._lean else self.step.needed(args)
        return self.step.defer(self.bound, args, tensors, alive)

    def defer(self) -> None:
        """Defer the launches of the last call again, whose tensors were compared."""
        alive = self.known, [*self.found.grads]
        self.step.defer(self.bound, self.known, [], alive)

    def repeats(self, shadow: Shadow) -> bool:
        """Does the last call follow from the contents of the shadow's containers?"""
        if not self._lean or self._reads_tensors:
            return False
        records = shadow.lanes.ours, shadow.plain.ours
        common = {*map(id, self._common())}
        given = self.known[: len(self.known) - len(self._beside)]
        read = [x for x in given if id(x) in common or not isinstance(x, torch.Tensor)]
        return all(any(holds(record, x) for record in records) for x in read)

    def _common(self) -> list[Any]:
        return self._pick(self.known) if self._pick is not None else []

    def compare_others(self) -> Callable[[], int]:
        """Return a call of C that compares the tensors of no lane, those of the last
        call.
        """
        return functools.partial(self._others, self._common(), *self._places)


class SteadyCall:
    """The objects of a call of a led step, for the next call; see `SteadyCalls`."""

    def __init__(
        self,
        leader: Leader,
        lane_guard: LaneGuard,
        trace: Trace,
        graph: LedStep,
        launcher: Launcher,
        direct: tuple[Callable[[], bool], Callable[[Any], Any]],
        helper: ctypes.PyDLL,
    ) -> None:
        self.leader, self.call = leader, leader.call
        self.lane_guard, self.present = lane_guard, lane_guard.present
        self.trace, self.graph, self.launcher = trace, graph, launcher
        assert trace.shadow is not None
        self.shadow, self.stand_in = trace.shadow, trace.shadow.stand_in
        self.compiled, self.count = trace.compiled, leader.state_guard.count
        self.fits, self.code = direct
        program = launcher.step.program
        #: what is so at the beginning of such a call; a signal handler may have changed
        #: it since the launcher was made
        self.facts = [
            Fact(ENTRY, vars(leader.last_call), "ended", True),
            Fact(ENTRY, vars(leader.pending), "refreshing", False),
            Fact(ENTRY, vars(leader.state_guard), "count", self.count),
            Fact(ENTRY, vars(launcher.step), "program", program),
            Fact(ENTRY, vars(program), "bound", launcher.bound),
            Fact(ENTRY, vars(launcher.bound), "guard", launcher.guard),
            Fact(ENTRY, vars(lane_guard), "tensors", launcher.guard),
        ]
        self._differs = in_c(helper, self.facts)
        #: what it compares, in one call of C, once numbers have stayed the same
        self.in_c: Comparison | None = None
        #: most calls whose numbers must stay the same before that
        self._calm, self._wait, self._attempts = 0, 1, 3
        #: for those who make one call of C of all of it
        self.attempts = Attempts()

    def step(
        self,
        optimizer: Any,
        given: PendingGradients | None = None,
        tail_arguments: TailArguments = NO_TAIL_ARGUMENTS,
    ) -> bool:
        """Do one step; return False if nothing was done, and the driver must do it.

        The arguments are those of the driver's `step`.
        """
        leader, call, launcher = self.leader, self.call, self.launcher
        guard, lane_guard = leader.state_guard, self.lane_guard
        pending, shadow = leader.pending, self.shadow
        # first, so that a step of a signal handler's at any later place is detected
        begun = pending.start(tail_arguments.launches_before)
        if given is None and tail_arguments is call.tail_arguments:
            if self.in_c is not None and self._same_in_c(optimizer, begun, self.in_c):
                return True
        if tail_arguments is not call.tail_arguments or self._differs():
            pending.drop()
            return False
        leader.call, leader.last_call.ended = call, False
        try:
            lists = [*map(PARAMS, optimizer.param_groups)]
            grads = lane_guard.compare(vars(optimizer), lists, optimizer.state, given)
            if grads is None or lane_guard.present != self.present:
                raise Differs
            call.optimizer, call.found, call.given = optimizer, launcher.found, given
            launcher.found.grads = grads
            if not lane_guard.rest_same:
                guard.compare(optimizer)
                if guard.count != self.count or not guard.moved <= self.graph.moving:
                    raise Differs
            known = shadow.clean and shadow.given[0] is guard.epoch
            if not (known and _same(shadow.helper, shadow.lanes.theirs)):
                self.trace.refreshed(optimizer, guard.epoch)
            if self.trace.compiled is not self.compiled or not self.fits():
                raise Differs
            shadow.clean = False
            self.code(self.stand_in)
            written = shadow.lanes.ours, shadow.plain.ours
            if pending.kept is None or not _same(shadow.helper, *written):
                raise Differs
        except Exception as error:
            # the driver meets the same error, and reports it
            reraise(error)
            leader.last_call.ended = False
            pending.check(begun)
            leader.last_call.ended = True
            return False
        else:
            leader.last_call.ended = False
            pending.finish(begun)
            shadow.clean = leader.last_call.ended = True
            if self._attempts:
                self._compare_in_c(optimizer, given)
            return True
        finally:
            call.optimizer, call.found, call.given = None, NOTHING, None
            launcher.found.grads = ()
            pending.drop()

    def _same_in_c(self, optimizer: Any, begun: object, compared: Comparison) -> bool:
        """Do `step` with this comparison; return False if something differs."""
        leader, call, launcher = self.leader, self.call, self.launcher
        try:
            if compared.differs():
                self.in_c = None
                return False
            leader.call, call.optimizer, call.found = call, optimizer, launcher.found
            launcher.found.grads = compared.grads
            launcher.defer()
            leader.last_call.ended = False
            leader.pending.finish(begun)
            leader.last_call.ended = True
            return True
        finally:
            call.optimizer, call.found, launcher.found.grads = None, NOTHING, ()
            compared.forget()
            if self.in_c is not None:
                leader.pending.drop()

    def _compare_in_c(self, optimizer: Any, given: PendingGradients | None) -> None:
        """Compare in C from now on, if numbers stay the same from call to call."""
        self._calm += 1
        if not self.lane_guard.rest_same:
            self._calm, self.in_c = 0, None
        if self._calm >= self._wait and self.in_c is None:
            self.in_c = comparison(self, optimizer, given)
            self._calm, self._wait = 0, min(2 * self._wait, LONGEST)
            self._attempts -= self.in_c is None

    def count_versions(self, grads: list[Any]) -> None:
        """Increment the versions of what a call wrote, in Python."""
        launcher = self.launcher
        self.call.found, launcher.found.grads = launcher.found, grads
        try:
            launcher.step.count_versions(launcher.bound, launcher.known)
        finally:
            self.call.found, launcher.found.grads = NOTHING, ()


def _same(helper: ctypes.PyDLL | None, *records: Contents) -> bool:
    """Are the contents of all records unchanged?"""
    for record in records:
        in_c = record.in_c
        if not (record.same(helper) if in_c is None else in_c()):
            return False
    return True


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
    if not (bound.guard.others and bound.guard.count and bound.guard.comparable):
        return None
    if not bound.waits or plan.captured.given or plan.captured.complexes:
        return None
    if plan.captured.result != () or bound.infers:
        return None
    if step.verify is not None or step.instead is not None:
        return None
    if not isinstance(trace.compiled, compat.DirectDynamoCall):
        return None
    shared = call.tail_arguments.shared
    beside = (*(graph.given or ()), *shared) if graph.completed else ()
    found = matcher.call_tensors(guard, [])
    launcher = Launcher(program, found, beside)
    direct = trace.compiled.direct(trace.stand_in, launcher)
    if direct is None or bound.helper is None:
        return None
    return SteadyCall(leader, guard, trace, graph, launcher, direct, bound.helper)
