"""Run the step of an optimizer with many lanes, of which Dynamo traces a few models.

Each kind of lanes has a model, a lane that belongs to no optimizer. Dynamo compiles the
step of an optimizer that has only the models; fuseopt extends the captured graph to all
lanes. A proof about the code, and rehearsals, show that this equals the whole step.
Each call compares what it may depend on without a guard of Dynamo's. If any of this
fails, Dynamo traces the whole step. A new kind of lanes needs a new trace.

Dynamo never reads the optimizer, only its shadow, which has the models. The launch of
the step writes to all lanes what the step wrote there.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compat.gc_pause import collector_paused
from ..compiler.internal_errors import OUT_OF_MEMORY
from ..compiler.report import Report
from ..config import resolve
from ..errors import CannotBuild, CaptureError, UnsupportedInput
from ..handlers import reraise
from ..inputs.keys import LanesDiffer
from ..inputs.lane_matcher import CallTensors, RecentLanes
from ..inputs.lanes import Lanes
from ..inputs.last_call import LastCall
from ..inputs.pending_gradients import PartMismatch, PendingGradients
from ..inputs.policy import LanesChanged
from ..inputs.presence import with_these_gradients
from ..inputs.state_guard import StateGuard
from ..runtime.commit import Pending, unless
from ..shadow.hindrance import LASTING, hindrance_of
from ..shadow.optimizer import Shadow, Write
from ..shadow.whole import NotTraced
from ..uniformity import Proof, prove
from .backend import backend_of
from .first_state import first_state, with_state
from .models import Models
from .packed import Packing
from .source import NOTHING, StepCall
from .steady import SteadyCalls
from .step import KEPT, RetraceFewerModels
from .step_wrapper import StepWrapper
from .tail_arguments import NO_TAIL_ARGUMENTS, StaleTailInputs, TailArguments
from .task import Task
from .traces import Trace, choose, present
from .worth import UNLIKE, check_alike, may_lead
from .writes import LaneNumbers, Writes

log = logging.getLogger("fuseopt.replicate")

#: The number of attempts of one call if lanes differ from an assumption.
TRIES = 4
REFUSALS = (LanesDiffer, CaptureError, CannotBuild, UnsupportedInput)


class LedOptimizer:
    """The step of one optimizer, led by models of its lanes.

    `refusal`: the reason why models no longer lead it, or "". `reports`: the list to
    which its Reports are added. `outward`: given if lanes are parts of tensors, which a
    step may only treat element by element. It maps writes to the optimizer of the parts
    to all writes. `wrapper`: calls around the step, in the same launch; see there.
    `packing`: the packed format of lanes.
    """

    def __init__(
        self,
        function: Any,
        options: Mapping[str, Any],
        reports: list[Report],
        outward: Callable[[list[Write]], list[Write]] | None = None,
        wrapper: StepWrapper | None = None,
        packing: Packing | None = None,
    ) -> None:
        self.function = function
        self.options = dict(options)
        config = resolve(None, options)
        self.refusal = "the option verify is on" if config.verify else ""
        self.hindrance = LASTING
        #: True to lead the step even for few or unlike lanes
        self.force_lanes = False
        self.state_guard, self.pending = StateGuard(), Pending()
        self.bucket_proof: Callable[[], None] | None = None  # see Owner in step
        self.outward, self.kept, parts = outward, KEPT, outward is not None
        common = function, config, self.state_guard, self.pending, reports
        self.task = Task(*common, parts, wrapper, packing)
        self.proof: Proof | None = None
        self.calls, self.proven = 0, -1  # the call that made the proof
        self.lanes: Lanes | None = None
        self.recent = RecentLanes()
        self.models = self._new_models(0, False, False)
        self.traces: list[Trace] = []
        self.trace: Trace | None = None
        #: True if lanes with different step counts (or sizes) may have one model
        self.counters = True
        self.ignore_sizes = wrapper is None or not wrapper.measures
        #: True if tracing creates state for lanes without state
        self.makes_state = False
        #: the last call, or the current one
        self.call = StepCall(None, NOTHING, compiled_nothing=False)
        #: the graph that ran last
        self.stepped: LaneNumbers | None = None
        # states that this call creates for lanes without state
        self._fresh: dict[torch.Tensor, dict[str, Any]] = {}
        self.last_call, self.steady = LastCall(), SteadyCalls()
        self._compiled_nothing = False  # true of the call before the last one

    def shadow_of_all(self) -> Any:
        """Return a shadow of the optimizer with all lanes, for a rehearsal."""
        every = Shadow(self.call.optimizer, follows=True)
        every.refresh(self.call.optimizer)
        return every.stand_in

    def release(self) -> None:
        """Release everything, after the optimizer's end."""
        self._cut_off(False)

    def wants(self, optimizer: Optimizer) -> bool:
        """May models lead the step of this optimizer?"""
        if self.refusal and not self.hindrance.stands(optimizer):
            self.refusal, self.hindrance = "", LASTING
        led = self.force_lanes or self.lanes is not None
        return not self.refusal and (led or may_lead(optimizer))

    @property
    def under_way(self) -> bool:
        """Is a call under way?"""
        return self.call.optimizer is not None

    def want(self) -> None:
        """Lead even few or unlike lanes: the whole step would be retraced whenever
        different lanes have gradients.
        """
        self.force_lanes = True
        if self.refusal.endswith(UNLIKE):
            self.refusal = ""

    def step(
        self,
        optimizer: Optimizer,
        make: Callable[..., Callable[..., Any]],
        given: PendingGradients | None = None,
        tail_arguments: TailArguments = NO_TAIL_ARGUMENTS,
    ) -> bool:
        """Do one step; return False, with `refusal`, if nothing was done.

        `make(backend)` compiles the step's function, or raises NotTraced if Dynamo
        would run it uncompiled: nothing was done, and `refusal` is "". `given`:
        gradients not yet assigned to parameters. PartMismatch: a parameter cannot have
        its gradient; nothing was done.
        """
        if self.steady.calls and self.steady.repeat(optimizer, given, tail_arguments):
            return True
        while True:
            call = StepCall(optimizer, NOTHING, True, given, tail_arguments)
            try:
                if self._attempt(call, make):
                    return True
            except NotTraced:
                return False
            if self.call is not call:  # a signal handler stepped the optimizer
                self.refusal, self.hindrance = "", LASTING
                continue
            if self.hindrance is not LASTING:
                return False  # else again, with kinds whose lanes are more alike
            if self.ignore_sizes and self.lanes is not None and self.lanes.reshaped():
                self.ignore_sizes = False
            elif self.counters and self.models.counted:
                self.counters, self.ignore_sizes = False, True
            else:
                self._start_anew()
                if self.counters and not self.refusal.endswith(UNLIKE):  # find the line
                    proof = prove(self.function, optimizer)
                    self.refusal = proof.refusal or self.refusal
                name = type(optimizer).__name__
                log.info("%s is traced whole: %s", name, self.refusal)
                return False
            self._start_anew()
            self.refusal = ""

    def _pause(self, traced: bool) -> None:
        """Release all of the optimizer; `traced`: keep the traces."""
        self._start_anew(traced)
        self.state_guard.forget()
        for trace in self.traces:
            trace.release()

    def _start_anew(self, traced: bool = False) -> None:
        self.lanes = self.proof = self.stepped = self.trace = None
        self.recent.clear()
        self.steady.clear()
        if not traced:
            self.traces.clear()
            self.models = self._new_models(0, False, False)

    def _new_models(self, groups: int, ignore_sizes: bool, counters: bool) -> Models:
        wrapper, packing = self.task.wrapper, self.task.packing
        columns = () if wrapper is None else wrapper.dtypes
        return Models(groups, ignore_sizes, counters, columns, packing)

    def _attempt(self, call: StepCall, make: Callable[..., Callable[..., Any]]) -> bool:
        """Do one step; return False, with `refusal`, if nothing was done."""
        self.calls += 1
        compiled_nothing = self.call.compiled_nothing
        if not self.last_call.begin():
            self._cut_off(self._compiled_nothing and compiled_nothing)
        self._compiled_nothing = compiled_nothing
        self.call = call
        self.steady.begin()
        try:
            for _ in range(TRIES):
                try:
                    if compiled_nothing:
                        self._step(call, make)
                    else:
                        with collector_paused():
                            self._step(call, make)
                    self.last_call.ended = True
                    return True
                except RetraceFewerModels as error:
                    log.info("a led step is traced anew: %s", error)
                    call.entered, call.compiled_nothing = False, True
                    assert self.trace is not None
                    assert self.lanes is not None
                    self.trace.refused.add(present(self.lanes))
                    self.trace.lanes = None
                except LanesChanged:
                    call.entered, call.compiled_nothing = False, True
                    self.recent.clear()
                    for trace in self.traces:
                        trace.drop()
                    self._survey(call, anew=True)
            raise LanesDiffer("its lanes change during the step")
        except (NotTraced, PartMismatch, StaleTailInputs):
            self.last_call.ended = not call.entered
            raise
        except REFUSALS as error:
            reraise(error)
            self.pending.check_unbegun(error)
            self.last_call.ended = True  # a later call makes everything anew
            self.refusal = str(error).partition("\n")[0]
            self.hindrance = hindrance_of(error, call.optimizer)
            if self.hindrance is not LASTING:
                self._pause(call.compiled_nothing)
        except Exception as error:
            reraise(error)
            lasting = isinstance(error, OUT_OF_MEMORY) or compat.must_fail()
            if lasting or call.entered:
                raise
            # if the step itself raises this, the whole step raises it again
            self.last_call.ended = True
            reason = str(error).strip().partition("\n")[0]
            kind = type(error).__name__
            self.refusal = f"a few lanes cannot be traced: {kind}: {reason}"
        finally:
            # the next call reads `compiled_nothing` of this one; release the rest
            call.optimizer, call.found, call.given = None, NOTHING, None
            self._fresh = {}
            self.pending.drop()
        return False

    def _cut_off(self, steady: bool) -> None:
        """Forget the last call, which was cut off; `steady`: it compiled nothing."""
        self.steady.clear()
        self.state_guard.forget()
        if not steady:
            self._start_anew()
            return
        self.recent.forget()
        for trace in self.traces:
            trace.forget()

    def _step(self, call: StepCall, make: Callable[..., Callable[..., Any]]) -> None:
        optimizer = call.optimizer
        if self.proof is None:
            call.put_gradients()
            self.prove()
        found, again = self._compare(optimizer), call.tail_arguments.again
        if again is not None and (found is None or again is not self.lanes):
            raise StaleTailInputs
        if found is None:
            found = self._survey(call)
        call.found = found
        if not found.rest_same:
            self.state_guard.compare(optimizer)
        assert self.lanes is not None
        for k, numbers in found.numbers.items():
            self.models.follow(self.lanes.kinds[k], numbers)
        if (trace := self.trace) is None or trace.lanes is not self.lanes:
            trace = self.trace = choose(self.traces, self.models, self.lanes)
            if trace.compiled is None and not (self.force_lanes or self.task.parts):
                trace.check_worth(self.lanes)
        trace.lanes = self.lanes
        shadow = trace.refreshed(optimizer, self.state_guard.epoch)
        if trace.compiled is None:
            trace.compiled = make(backend_of(self))
        if self.call is not call:
            raise LanesDiffer("a signal handler stepped the optimizer")
        shadow.clean, self.stepped = False, None
        begun = self.pending.start(call.tail_arguments.launches_before)
        traced = len(trace.steps)
        try:
            trace.compiled(shadow.stand_in)
        finally:
            if self.models.filled:
                self.models.empty()
        if self.stepped is None and (self.task.wrapper or self.task.packing):
            raise LanesDiffer("fuseopt compiled no part of the step")
        if self._fresh or shadow.changed():
            call.put_gradients()
            parts = self.lanes, self.models, shadow, self._fresh, trace.made()
            writes = Writes(*parts, self.stepped).to(optimizer.state)
            if self.models.counted and len(trace.steps) > traced:
                trace.check_counters(self.models, optimizer)
            if self.outward is not None:
                writes = self.outward(writes)
            if call.tail_arguments.flag is not None:
                writes = [unless(call.tail_arguments.flag, writes)]
            self.pending.finish(begun, writes)
            if self.outward is None and call.tail_arguments.flag is None:
                shadow.settle(lanes=False)
        else:
            self.pending.finish(begun)
            shadow.clean = True
            self.steady.end(self)

    @property
    def active(self) -> tuple[int, ...]:
        """The models that Dynamo traces, by number."""
        return () if self.trace is None else self.trace.active

    def _compare(self, optimizer: Any) -> CallTensors | None:
        """Set `lanes` to matching recent ones; return their tensors, or None."""
        if self.recent.helper is None and self.trace and self.trace.steps:
            self.recent.helper = self.trace.steps[-1].helper
        record = self.state_guard.struct, self.call.given
        lanes, found = self.recent.compare(optimizer, *record) or (self.lanes, None)
        if lanes is not None and lanes is not self.lanes:
            if found is not None and self.makes_state and lanes.unmade:
                return None
            self.models.take(lanes)
            self.lanes = lanes
        return found

    def live_in(self, home: Lanes) -> None:
        """Find the lanes of later calls by their home."""
        self.models.take(home)
        home.led_by = weakref.ref(self.trace)
        self.recent.live_in(home)

    def _survey(self, call: StepCall, anew: bool = False) -> CallTensors:
        """Group all lanes into kinds; `anew`: do not reuse the last call's kinds."""
        optimizer = call.optimizer
        call.put_gradients()
        assert self.proof is not None
        ignore_sizes = self.ignore_sizes and not self.proof.sizes
        if self.models.n_groups != (n := len(optimizer.param_groups)):
            self.models = self._new_models(n, ignore_sizes, self.counters)
            self.traces.clear()
            self.trace = None
        how = ignore_sizes, self.counters
        known = None if anew or self.bucket_proof is not None else self.lanes
        lanes = with_these_gradients(known, optimizer, *how)
        if lanes is not None and not (self.makes_state and lanes.unmade):
            found = self._taken(lanes, optimizer, young=True)
            if found is not None:
                return found
        call.surveyed = True
        lanes = Lanes(optimizer, *how)
        if self.makes_state and lanes.unmade:
            return self._initialized(lanes)
        return self._known(lanes, optimizer)

    def _known(self, lanes: Lanes, optimizer: Any) -> CallTensors:
        """Record `lanes` as those of `optimizer`; return their tensors."""
        tensors = self._taken(lanes, optimizer)
        if tensors is None:
            raise LanesDiffer("optimizer state changed while lanes were being grouped")
        return tensors

    def _taken(
        self, lanes: Lanes, optimizer: Any, young: bool = False
    ) -> CallTensors | None:
        """Do `_known`; None if state has changed. `young`: see LaneMatcher."""
        if not (self.force_lanes or self.task.parts):
            check_alike(lanes)
        self.models.take(lanes)
        self.lanes = lanes
        self.recent.take(lanes, self.kept, young)
        tensors = self._compare(optimizer)
        return tensors if self.lanes is lanes else None

    def _initialized(self, lanes: Lanes) -> CallTensors:
        """Create state as tracing does, for lanes with gradients but without state."""
        every = self.shadow_of_all()
        self._fresh = first_state(self.call.optimizer, every, lanes)
        view = with_state(self.call.optimizer, self._fresh)
        return self._known(Lanes(view, lanes.ignore_sizes, lanes.counters), view)

    def survey_holds(self) -> None:
        """Raise LanesChanged if lanes that were alike no longer are.

        Each call compares the objects that lanes hold. `p.data = ...` changes a dtype
        or shape in place. Plans detect that, but the first plan of a graph does not.
        """
        lanes = self.lanes
        assert lanes is not None
        view = with_state(self.call.optimizer, self._fresh)
        now = Lanes(view, lanes.ignore_sizes, lanes.counters)
        if now.grouping() != lanes.grouping():
            raise LanesChanged

    def settle(self) -> None:
        """Create the state of all lanes, if tracing created that of their models."""
        assert self.lanes is not None
        assert self.trace is not None
        trace = self.trace
        if self.models.adopt(trace.stand_in.state):
            trace.state.update(self.models.states(trace.active))
            self.makes_state = True
            self.call.found = self._initialized(self.lanes)
            if not set(present(self.lanes)) <= set(trace.active):
                raise LanesDiffer("lanes of one kind get different state")

    def prove(self) -> Proof:
        """Return a proof, made per call, that lanes are alike. Raises LanesDiffer."""
        if self.proof is None or self.proven != self.calls:
            optimizer = self.call.optimizer
            self.counters = self.counters and compat.can_stay_symbolic()
            proof = prove(self.function, optimizer, counters=self.counters)
            if proof.refusal and self.counters and not self.models.params:
                proof = prove(self.function, optimizer)
                self.counters = bool(proof.refusal)
            self.proof, self.proven = proof, self.calls
        self.allow(self.proof)
        return self.proof

    def allow(self, proof: Proof) -> None:
        """Raise LanesDiffer if a proof does not hold for these lanes."""
        reshaped = self.lanes is not None and self.lanes.reshaped()
        if refusal := proof.why_not(reshaped, self.task.parts):
            raise LanesDiffer(refusal)
