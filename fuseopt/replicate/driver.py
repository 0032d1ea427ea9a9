"""An optimizer of many lanes -> its step, of which Dynamo traces a few lanes.

Lanes that are alike have one of them lead. Dynamo compiles the step of an optimizer
that has only the leading ones; what it captured is extended to all. That this gives
what the whole step would is not assumed: the step is rehearsed on all lanes and on the
leading ones, and the calls that reach a lane must be those that reach the one that
leads it, in both. What it may depend on and no guard of Dynamo's covers is compared at
each call. Where anything stands against it, Dynamo traces the whole step as ever.

The optimizer itself is never given to what Dynamo traces: its shadow is, which has the
leading lanes. What the step left there is written to all lanes when it is launched.
"""

from __future__ import annotations

import collections
import logging
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from .. import compat
from ..compat.gc_pause import collector_paused
from ..compiler.entry import BACKEND
from ..compiler.internal_errors import OUT_OF_MEMORY
from ..compiler.partition import decide
from ..compiler.report import Report
from ..config import resolve
from ..errors import CannotBuild, CaptureError, UnsupportedInput
from ..runtime.commit import Pending
from ..shadow.lanes import Found, Lanes, Unlike
from ..shadow.optimizer import Shadow, Write
from ..shadow.state_guard import StateGuard
from ..shadow.whole import NotTraced
from ..uniformity import Proof, prove
from .source import Call
from .step import PATIENCE, LedStep, Stale, Task
from .writes import Writes

log = logging.getLogger("fuseopt")

#: Optimizers of fewer lanes than this are traced whole.
FEW = 16
#: At most this share of the lanes may lead.
SHARE = 0.5
NOTHING = Found([])
REFUSALS = (Unlike, CaptureError, CannotBuild, UnsupportedInput)


class Representatives:
    """The step of one optimizer, led by a few lanes. `why`: why it no longer is.

    `told` gets its Reports. `outward`: lanes are parts of tensors, of which a step may
    do no more than treat each element alike; what is written to the optimizer that has
    the parts -> all that is to be written.
    """

    def __init__(
        self,
        function: Any,
        options: Mapping[str, Any],
        told: list[Report],
        outward: Callable[[list[Write]], list[Write]] | None = None,
    ) -> None:
        self.function = function
        self.options = dict(options)
        config = resolve(None, options)
        self.why = "verify was asked for" if config.verify else ""
        self.noticed = StateGuard()
        self.pending = Pending()
        self.outward = outward
        parts = outward is not None
        self.task = Task(function, config, self.noticed, self.pending, told, parts)
        self.proof: Proof | None = None
        self.calls = 0
        self.proven = -1  # the call in which the proof was made
        self.lanes: Lanes | None = None
        self.few: list[list[torch.Tensor]] = []  # the leading ones of each group
        self.compiled: Callable[..., Any] | None = None
        #: may lanes of other sizes lead each other?
        self.loose = True
        self.surveys = 0
        #: the last call, or the one that is under way
        self.call = Call(None, NOTHING, quiet=False)
        self.steps: list[LedStep] = []
        self.shadow: Shadow | None = None
        # the state of the leading ones, for these lanes
        self._few: Any = None
        self._few_of: Lanes | None = None
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
        self.shadow = self._few = self._few_of = None
        self._cut_off(False)

    def wants(self, optimizer: Optimizer) -> bool:
        """Are there so many lanes that it is worth while?"""
        n = 0
        for group in optimizer.param_groups:
            n += len(group["params"])
        return not self.why and n >= FEW

    # ---------------------------------------------------------------- a call

    def step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> bool:
        """Do one step; False, with `why`, if nothing was done.

        `make(backend)` compiles the step's function anew, or raises NotTraced when it
        is run without Dynamo: then nothing was done, and `why` is "".
        """
        while True:
            try:
                if self._attempt(optimizer, make):
                    return True
            except NotTraced:
                return False
            loose = self.loose and self.lanes is not None and self.lanes.reshaped
            self.lanes = self.compiled = self.proof = None
            self.steps.clear()
            if not loose:
                name = type(optimizer).__name__
                log.info("%s is traced whole: %s", name, self.why)
                return False
            # once more, with lanes that differ in nothing but contents
            self.loose, self.why, self.surveys = False, "", 0

    def _attempt(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> bool:
        """Do one step; False, with `why`, if nothing was done."""
        self.calls += 1
        quiet = self.call.quiet
        if not self._sound:
            self._cut_off(self._steady and quiet)
        self._steady, self._sound = quiet, False
        call = self.call = Call(optimizer, NOTHING)
        try:
            for _ in range(2):
                try:
                    if quiet:
                        self._step(call, make)
                    else:
                        with collector_paused():
                            self._step(call, make)
                    self._sound = True
                    return True
                except Stale:
                    call.entered, call.quiet = False, True  # it has written nothing
                    self._survey(optimizer)
            raise Unlike("its lanes change while it steps")
        except NotTraced:
            self._sound = True
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
            call.optimizer, call.found = None, NOTHING
            self._fresh = {}
            self.pending.drop()
        return False

    def _cut_off(self, steady: bool) -> None:
        """An exception ended the last call somewhere: take nothing for known.

        `steady`: nothing was compiled in it.
        """
        self.noticed.forget()
        if not steady:
            self.lanes = self.compiled = None
            self.steps.clear()
            return
        if self.lanes is not None:
            self.lanes.forget()
        for step in self.steps:
            step.forget()

    def _step(self, call: Call, make: Callable[..., Callable[..., Any]]) -> None:
        optimizer = call.optimizer
        if self.proof is None:
            self.prove()
        found = None if self.lanes is None else self._look(optimizer)
        if found is None:
            self._survey(optimizer)
            found = self._look(optimizer)
            if found is None:
                raise Unlike("its lanes are not what they seem")
        call.found = found
        if not found.rest_same:
            self.noticed.look(optimizer)
        assert self.lanes is not None
        if self.compiled is None:
            self.few = [[] for _ in self.lanes.lists]
            for i in self.lanes.leads:
                self.few[self.lanes.groups[i]].append(self.lanes.params[i])
            self.compiled = make(self._backend())
            self.steps.clear()
        shadow = self._shadow(optimizer)
        shadow.clean = False
        self._fresh = {}
        begun = self.pending.start()
        self.compiled(shadow.itself)
        if self._fresh or shadow.changed():
            writes = self._writes(optimizer)
            if self.outward is not None:
                writes = self.outward(writes)
            self.pending.finish(begun, writes)
            shadow.settle()
        else:
            self.pending.finish(begun)
            shadow.clean = True

    def _look(self, optimizer: Optimizer) -> Found | None:
        lanes = self.lanes
        assert lanes is not None
        if len(optimizer.param_groups) != len(lanes.lists):
            return None
        for kind in lanes.kinds:
            own = lanes.states[kind.lead]
            if tuple(own or ()) != kind.keys:
                return None
            if (lanes.params[kind.lead].grad is not None) != kind.has_grad:
                return None
        helper = self.steps[-1].helper if self.steps else None
        return lanes.look(optimizer, self.noticed.struct, helper)

    def _survey(self, optimizer: Optimizer) -> None:
        self.surveys += 1
        if self.surveys > PATIENCE:
            raise Unlike("its lanes change too often")
        known = self.lanes
        assert self.proof is not None
        lanes = self.lanes = Lanes(optimizer, self.loose and not self.proof.sizes)
        few = len(lanes.leads) <= SHARE * len(lanes.params)
        if not (few or self.task.parts):
            raise Unlike(
                f"{len(lanes.leads)} of its {len(lanes.params)} lanes are unlike"
            )
        same = known is not None and _grouping(known) == _grouping(lanes)
        if not same:
            self.compiled = None

    def _shadow(self, optimizer: Optimizer) -> Shadow:
        """The optimizer's shadow, with the leading lanes as they are now."""
        lanes = self.lanes
        assert lanes is not None
        if self.shadow is None:
            self.shadow = Shadow(optimizer)
            if type(optimizer.state) not in (dict, collections.defaultdict):
                raise Unlike(f"its state is a {type(optimizer.state).__name__}")
            self._few = optimizer.state.copy()
        if self._few_of is not lanes:
            self._few.clear()
            for i in lanes.leads:
                state = lanes.states[i]
                if state is not None:
                    self._few[lanes.params[i]] = state
            self._few_of = lanes
        self.shadow.refresh(optimizer, self._few, self.few)
        return self.shadow

    # ---------------------------------------------------------------- Dynamo's side

    def _backend(self) -> Callable[..., Any]:
        # Dynamo keeps each backend that it was ever given
        owner = weakref.ref(self)

        @compat.refusals_pass(BACKEND)
        def lead(gm: GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
            self = owner()
            assert self is not None
            if len(self.steps) >= PATIENCE:
                raise Unlike("its step is traced too often")
            decision = decide(gm, list(args), compat.traces_step())
            if decision.parts or decision.whole != "update":
                raise Unlike(f"its graph is more than an update: {decision.why}")
            self.call.quiet = False
            made = LedStep(self, self.task, gm)
            self.steps.append(made)
            # Dynamo keeps what it is given with the code that calls it, and that code
            # is kept by the optimizer's step: it must not keep the optimizer's tensors
            return _Reference(made)

        lead._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
        return lead

    def survey_holds(self) -> None:
        """Raise Stale if lanes that were alike no longer are.

        Each call compares which objects lanes hold. The dtype or shape of one of them
        changes in place (`p.data = ...`); a plan notices, but not the first of a graph.
        """
        assert self.lanes is not None
        now = Lanes(self.call.optimizer, self.lanes.loose)
        if _grouping(now) != _grouping(self.lanes):
            raise Stale

    def settle(self) -> None:
        """Have state ready for all lanes like the leading ones', which tracing made."""
        optimizer, lanes = self.call.optimizer, self.lanes
        assert lanes is not None
        assert self.shadow is not None
        seen = self.shadow.itself.state
        leads = [kind.lead for kind in lanes.kinds if not kind.has_state]
        made = [i for i in leads if seen.get(lanes.params[i])]
        if not made:
            return
        every = self.shadow_of_all()
        known = dict(optimizer.state)
        for i in made:
            every.state[lanes.params[i]] = dict(seen[lanes.params[i]])
        if not compat.initialize(every):
            raise Unlike("tracing made state, and nothing says how")
        if not all(_same(every.state[p], own) for p, own in known.items()):
            raise Unlike("tracing changes state")
        self._fresh = {
            p: every.state[p]
            for p in lanes.params
            if p in every.state and p not in known
        }
        # as it will be
        state = {**known, **self._fresh}
        groups = optimizer.param_groups
        view: Any = types.SimpleNamespace(state=state, param_groups=groups)
        now = Lanes(view, lanes.loose)
        if _grouping(now) != _grouping(lanes):
            raise Unlike("lanes that were alike get unlike state")
        self.lanes = now
        found = self._look(view)
        if found is None:
            raise Unlike("its lanes are not what they seem")
        self.call.found = found

    def prove(self) -> Proof:
        """The proof that the code which a step may run now treats lanes alike, or
        Unlike.

        Once in a call is enough, for nothing changes before the step has run.
        """
        if self.proof is None or self.proven != self.calls:
            self.proof = prove(self.function, self.call.optimizer)
            self.proven = self.calls
        if self.proof.why:
            raise Unlike(self.proof.why)
        if self.proof.sizes and self.lanes is not None and self.lanes.reshaped:
            raise Unlike("it reads sizes, in which lanes differ")
        if self.proof.sizes and self.task.parts:
            raise Unlike("it reads sizes, which are those of whole tensors")
        if self.proof.classes and self.task.parts:
            raise Unlike("it asks for the class of a tensor")
        return self.proof

    # ---------------------------------------------------------------- afterwards

    def _writes(self, optimizer: Optimizer) -> list[Write]:
        """What gives all lanes what the step gave the leading ones, as calls of C."""
        lanes, shadow = self.lanes, self.shadow
        assert lanes is not None
        assert shadow is not None
        made: dict[int, list[torch.Tensor]] = {}
        for step in self.steps:
            made.update(step.take())
        return Writes(lanes, shadow, self._few, self._fresh, made).to(optimizer.state)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return tuple(a) == tuple(b) and all(map(is_, a.values(), b.values()))


class _Reference:
    """A step, called in its place and not kept alive."""

    def __init__(self, step: LedStep) -> None:
        self.step = weakref.ref(step)

    def __call__(self, *args: Any) -> Any:
        step = self.step()
        assert step is not None
        return step(*args)


def _grouping(lanes: Lanes) -> list[Any]:
    return [
        lanes.lists_of(),
        [(kind.lead, kind.others) for kind in lanes.kinds],
    ]
