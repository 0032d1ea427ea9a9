"""An optimizer of many lanes -> its step, of which Dynamo traces a few lanes.

Lanes that are alike have a model, a lane of nobody's. Dynamo compiles the step of an
optimizer that has only the models; what it captured is extended to all lanes. That this
gives what the whole step would is proven of the code, and shown: the step is rehearsed
on some lanes of each kind and on the models, and the calls that reach a lane must be
those that reach its model. What it may depend on and no guard of Dynamo's covers is
compared at each call. Where anything stands against it, Dynamo traces the whole step.

Which lanes there are of a kind may be another thing in each call, for gradients come
and go: what was captured of the models is then extended to other lanes, and nothing is
traced or built. A new kind is a new trace.

The optimizer itself is never given to what Dynamo traces: its shadow is, which has the
models. What the step left there is written to all lanes when it is launched.
"""

from __future__ import annotations

import ctypes
import logging
import types
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
from ..runtime.commit import Pending, unless
from ..runtime.guards.given import Given, Misfit
from ..shadow.lanes import Found, Lanes, Unlike
from ..shadow.optimizer import Shadow, Write
from ..shadow.state_guard import StateGuard
from ..shadow.whole import NotTraced
from ..uniformity import Proof, prove
from .around import Around
from .aside import NO_ASIDE, Aside, Other
from .backend import backend_of
from .first_state import first_state
from .models import Models
from .policy import Stale
from .recent import Recent
from .source import Call
from .step import KEPT, Fewer, LedStep, Task
from .traces import Trace, choose, present
from .writes import Writes

log = logging.getLogger("fuseopt.replicate")

#: Optimizers of fewer lanes than this are traced whole.
FEW = 16
#: At most this share of the lanes may lead.
SHARE = 0.5
NOTHING = Found([])
UNLIKE = "lanes are unlike"
#: So often one call is begun anew, where what was known of lanes does not hold.
TRIES = 4
REFUSALS = (Unlike, CaptureError, CannotBuild, UnsupportedInput)


def many_lanes(optimizer: Optimizer) -> bool:
    """Has an optimizer so many lanes that a few of them are worth tracing?"""
    return sum(len(group["params"]) for group in optimizer.param_groups) >= FEW


class Representatives:
    """The step of one optimizer, led by models of its lanes.

    `why`: why it no longer is. `told` gets its Reports. `outward`: lanes are parts of
    tensors, of which a step may do no more than treat each element alike; what is
    written to the optimizer that has the parts -> all that is to be written. `around`:
    what stands around the step, in the same launch; see there.
    """

    def __init__(
        self,
        function: Any,
        options: Mapping[str, Any],
        told: list[Report],
        outward: Callable[[list[Write]], list[Write]] | None = None,
        around: Around | None = None,
    ) -> None:
        self.function = function
        self.options = dict(options)
        config = resolve(None, options)
        self.why = "verify was asked for" if config.verify else ""
        #: is it worth while even for few lanes, or for such as are unlike?
        self.anyway = False
        self.noticed = StateGuard()
        self.pending = Pending()
        self.outward = outward
        self.apart: Callable[[], None] | None = None  # see Owner in step
        self.kept, parts = KEPT, outward is not None
        self.task = Task(
            function, config, self.noticed, self.pending, told, parts, around
        )
        self.proof: Proof | None = None
        self.calls = 0
        self.proven = -1  # the call in which the proof was made
        self.lanes: Lanes | None = None
        self.recent = Recent()
        self.models = self._new_models(0, False, False)
        self.traces: list[Trace] = []
        self.trace: Trace | None = None
        #: may lanes of other sizes, or that count other steps, have one model?
        self.counters = True
        self.loose = around is None or not around.measures
        #: does tracing make state for lanes that have none?
        self.makes_state = False
        #: the last call, or the one that is under way
        self.call = Call(None, NOTHING, quiet=False)
        #: the graph that ran last
        self.stepped: LedStep | None = None
        # what lanes have been given in this call that have no state yet
        self._fresh: dict[torch.Tensor, dict[str, Any]] = {}
        # did the last call end as calls do? Had the one before it compiled nothing?
        self._sound = True
        self._steady = False

    def shadow_of_all(self) -> Any:
        """What a rehearsal is to take for the optimizer: a shadow of all its lanes."""
        every = Shadow(self.call.optimizer)
        every.refresh(self.call.optimizer)
        return every.itself

    def release(self) -> None:
        """The optimizer is no more: keep nothing of it."""
        self._cut_off(False)

    def wants(self, optimizer: Optimizer) -> bool:
        """Are there so many lanes that it is worth while?"""
        return not self.why and (self.anyway or many_lanes(optimizer))

    @property
    def under_way(self) -> bool:
        """Is a call of this one's under way?"""
        return self.call.optimizer is not None

    def want(self) -> None:
        """Gradients come and go: traced whole, the step would be traced each time."""
        self.anyway = True
        if self.why.endswith(UNLIKE):
            self.why = ""

    # ---------------------------------------------------------------- a call

    def step(
        self,
        optimizer: Optimizer,
        make: Callable[..., Callable[..., Any]],
        given: Given | None = None,
        aside: Aside = NO_ASIDE,
    ) -> bool:
        """Do one step; False, with `why`, if nothing was done.

        `make(backend)` compiles the step's function anew, or raises NotTraced when it
        is run without Dynamo: then nothing was done, and `why` is "". `given`: has
        gradients that parameters do not have yet; Misfit if they cannot have them: then
        nothing was done either, and another call may. `aside`: what the call has for
        what stands around the step.
        """
        while True:
            call = Call(optimizer, NOTHING, given=given, aside=aside)
            try:
                if self._attempt(call, make):
                    return True
            except NotTraced:
                return False
            # once more, with lanes that differ in less
            if self.loose and self.lanes is not None and self.lanes.reshaped():
                self.loose = False
            elif self.counters and self.models.counted:
                self.counters, self.loose = False, True
            else:
                self._start_anew()
                if self.counters and not self.why.endswith(UNLIKE):  # which line?
                    self.why = prove(self.function, optimizer).why or self.why
                log.info("%s is traced whole: %s", type(optimizer).__name__, self.why)
                return False
            self._start_anew()
            self.why = ""

    def _start_anew(self) -> None:
        self.lanes = self.proof = self.stepped = self.trace = None
        self.recent.clear()
        self.traces.clear()
        self.models = self._new_models(0, False, False)

    def _new_models(self, groups: int, loose: bool, counters: bool) -> Models:
        around = self.task.around
        columns = () if around is None else around.dtypes
        return Models(groups, loose, counters, columns)

    def _attempt(self, call: Call, make: Callable[..., Callable[..., Any]]) -> bool:
        """Do one step; False, with `why`, if nothing was done."""
        self.calls += 1
        kind, quiet = type(call.optimizer).__name__, self.call.quiet
        if not self._sound:
            self._cut_off(self._steady and quiet)
        self._steady, self._sound = quiet, False
        self.call = call
        try:
            for _ in range(TRIES):
                try:
                    if quiet:
                        self._step(call, make)
                    else:
                        with collector_paused():
                            self._step(call, make)
                    self._sound = True
                    return True
                except Fewer as error:
                    # it has written nothing
                    log.info("%s is traced anew: %s", kind, error)
                    call.entered, call.quiet = False, True
                    assert self.trace is not None
                    assert self.lanes is not None
                    self.trace.refused.add(present(self.lanes))
                    self.trace.lanes = None
                except Stale:
                    call.entered, call.quiet = False, True
                    self.recent.clear()
                    for trace in self.traces:
                        for step in trace.steps:
                            step.drop()
                    self._survey(call)
            raise Unlike("its lanes change while it steps")
        except (NotTraced, Misfit, Other):
            self._sound = not call.entered
            raise
        except REFUSALS as error:
            self._sound = True  # and all of it is made anew, if anything
            self.why = str(error).partition("\n")[0]
        except Exception as error:
            if isinstance(error, OUT_OF_MEMORY):
                raise
            if call.entered or compat.stance() == "fail_on_recompile":
                raise
            # whatever it is, the whole step says it again if it is the step's own
            self._sound = True
            reason = str(error).strip().partition("\n")[0]
            self.why = f"a few lanes cannot be traced: {type(error).__name__}: {reason}"
        finally:
            # the next call asks of this one whether it was quiet
            call.optimizer, call.found, call.given = None, NOTHING, None
            self._fresh = {}
            self.pending.drop()
        return False

    def _cut_off(self, steady: bool) -> None:
        """An exception ended the last call somewhere: take nothing for known.

        `steady`: nothing was compiled in it.
        """
        self.noticed.forget()
        if not steady:
            self._start_anew()
            return
        self.recent.forget()
        for trace in self.traces:
            for step in trace.steps:
                step.forget()

    def _step(self, call: Call, make: Callable[..., Callable[..., Any]]) -> None:
        optimizer = call.optimizer
        if self.proof is None:
            call.put_gradients()
            self.prove()
        found = self._look(optimizer)
        again = call.aside.again
        if again is not None and (found is None or again is not self.lanes):
            raise Other
        if found is None:
            found = self._survey(call)
        call.found = found
        if not found.rest_same:
            self.noticed.look(optimizer)
        assert self.lanes is not None
        for k, numbers in found.numbers.items():
            self.models.follow(self.lanes.kinds[k], numbers)
        trace = self.trace = self._trace()
        trace.lanes = self.lanes
        if trace.compiled is None:
            trace.compiled = make(backend_of(self))
        shadow = trace.refreshed(optimizer)
        shadow.clean = False
        self.stepped = None
        begun = self.pending.start(call.aside.ahead)
        traced = len(trace.steps)
        try:
            trace.compiled(shadow.itself)
        finally:
            if self.models.filled:
                self.models.empty()
        if self.task.around is not None and self.stepped is None:
            raise Unlike("nothing of the step is compiled")
        if self._fresh or shadow.changed():
            call.put_gradients()
            writes = self._writes(optimizer)
            if self.models.counted and len(trace.steps) > traced:
                trace.check_counters(self.models, optimizer)
            if self.outward is not None:
                writes = self.outward(writes)
            if call.aside.flag is not None:
                writes = [unless(call.aside.flag, writes)]
            self.pending.finish(begun, writes)
        else:
            self.pending.finish(begun)
            shadow.clean = True

    @property
    def active(self) -> tuple[int, ...]:
        """The models that Dynamo was given, by number."""
        assert self.trace is not None
        return self.trace.active

    def _trace(self) -> Trace:
        """What was traced of the kinds of lanes that there are, and of more at most."""
        assert self.lanes is not None
        if self.trace is not None and self.trace.lanes is self.lanes:
            return self.trace
        return choose(self.traces, self.models, present(self.lanes))

    def _look(self, optimizer: Any) -> Found | None:
        """Lanes as they were in one of the last calls: this one's; None: in none."""
        asked = self.noticed.struct, self.helper, self.call.given
        self.lanes, found = self.recent.look(optimizer, *asked) or (self.lanes, None)
        return found

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The library of the guards, once a graph's plan has it."""
        if self.trace is None or not self.trace.steps:
            return None
        return self.trace.steps[-1].helper

    def _survey(self, call: Call) -> Found:
        """Look at all lanes anew, and have a model for each kind of them."""
        optimizer = call.optimizer
        call.surveyed = True
        call.put_gradients()
        assert self.proof is not None
        loose = self.loose and not self.proof.sizes
        if self.models.n_groups != len(optimizer.param_groups):
            n = len(optimizer.param_groups)
            self.models = self._new_models(n, loose, self.counters)
            self.traces.clear()
            self.trace = None
        lanes = Lanes(optimizer, loose, self.counters)
        unmade = any(kind.has_grad and not kind.has_state for kind in lanes.kinds)
        if unmade and self.makes_state:
            return self._initialized(lanes)
        return self._known(lanes, optimizer)

    def _known(self, lanes: Lanes, optimizer: Any) -> Found:
        """Take lanes for those of the optimizer, or of what is like it."""
        few = len({(kind.key[:2], repr(kind.numbers)) for kind in lanes.kinds})
        may_differ = self.anyway or self.task.parts
        if not may_differ and few > SHARE * len(lanes.params):
            raise Unlike(f"{few} of its {len(lanes.params)} {UNLIKE}")
        self.models.take(lanes)
        self.lanes = lanes
        self.recent.take(lanes, self.kept, self.apart is not None)
        found = self._look(optimizer)
        if found is None or self.lanes is not lanes:
            raise Unlike("its lanes are not what they seem")
        return found

    def _initialized(self, lanes: Lanes) -> Found:
        """Make the state that tracing makes, for lanes that have gradients and none."""
        every = self.shadow_of_all()
        self._fresh = first_state(self.call.optimizer, every, lanes)
        view = self._view()
        return self._known(Lanes(view, lanes.loose, lanes.counters), view)

    def _view(self) -> Any:
        """The optimizer with the state that lanes get in this call."""
        optimizer = self.call.optimizer
        state = {**optimizer.state, **self._fresh}
        return types.SimpleNamespace(state=state, param_groups=optimizer.param_groups)

    # ---------------------------------------------------------------- Dynamo's side

    def survey_holds(self) -> None:
        """Raise Stale if lanes that were alike no longer are.

        Each call compares which objects lanes hold. The dtype or shape of one of them
        changes in place (`p.data = ...`); a plan notices, but not the first of a graph.
        """
        lanes = self.lanes
        assert lanes is not None
        now = Lanes(self._view(), lanes.loose, lanes.counters)
        if now.grouping() != lanes.grouping():
            raise Stale

    def settle(self) -> None:
        """Have state ready for all lanes like that of models, which tracing made."""
        assert self.lanes is not None
        assert self.trace is not None
        trace = self.trace
        if self.models.adopt(trace.shadow_of_models.state):
            trace.state.update(self.models.states(trace.active))
            self.makes_state = True
            self.call.found = self._initialized(self.lanes)
            if not set(present(self.lanes)) <= set(trace.active):
                raise Unlike("lanes that were alike get unlike state")

    def prove(self) -> Proof:
        """The proof that the code which a step may run now treats lanes alike. Once in
        a call is enough: nothing changes before the step has run.
        """
        if self.proof is None or self.proven != self.calls:
            optimizer = self.call.optimizer
            if self.counters and not compat.can_stay_symbolic():
                self.counters = False
            proof = prove(self.function, optimizer, counters=self.counters)
            if proof.why and self.counters and not self.models.params:
                proof = prove(self.function, optimizer)
                self.counters = bool(proof.why)
            self.proof = proof
            self.proven = self.calls
        self.allow(self.proof)
        return self.proof

    def allow(self, proof: Proof) -> None:
        """Raise Unlike where a proof is none for these lanes."""
        reshaped = self.lanes is not None and self.lanes.reshaped()
        why = proof.why_not(reshaped, self.task.parts)
        if why:
            raise Unlike(why)

    # ---------------------------------------------------------------- afterwards

    def _writes(self, optimizer: Optimizer) -> list[Write]:
        """What gives all lanes what the step gave the models, as calls of C."""
        lanes, trace = self.lanes, self.trace
        assert lanes is not None
        assert trace is not None
        assert trace.shadow is not None
        made: dict[int, dict[int, torch.Tensor]] = {}
        for step in trace.steps:
            made.update(step.take())
        given = lanes, self.models, trace.shadow, self._fresh, made, self.stepped
        return Writes(*given).to(optimizer.state)
