"""An optimizer of many lanes -> its step, of which Dynamo traces a few lanes.

Lanes that are alike have one of them lead. Dynamo compiles the step of an optimizer
that has only the leading ones; what it captured is extended to all. That this gives
what the whole step would is not assumed: the step is rehearsed on all lanes and on the
leading ones, and the calls that reach a lane must be those that reach the one that
leads it, in both. What it may depend on and no guard of Dynamo's covers is compared at
each call. Where anything stands against it, Dynamo traces the whole step as ever.
"""

from __future__ import annotations

import collections
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from . import compat
from .backend import BACKEND
from .collector import collector_paused
from .config import resolve
from .errors import CaptureError, CompilerMissing, FuseoptError, UnsupportedInput
from .lanes import GRAD, PARAM, Found, Lanes, Unlike
from .led import PATIENCE, LedStep, Stale
from .noticed import Noticed
from .split import decide
from .uniformity import Proof, prove

log = logging.getLogger("fuseopt")

#: Optimizers of fewer lanes than this are traced whole.
FEW = 16
#: At most this share of the lanes may lead.
SHARE = 0.5
REFUSALS = (Unlike, CaptureError, CompilerMissing, UnsupportedInput)


class NotTraced(FuseoptError):
    """Dynamo let the leading lanes' step run as it is, of which nothing was done."""


class Representatives:
    """The step of one optimizer, led by a few lanes. `why`: why it no longer is."""

    def __init__(self, function: Any, options: Mapping[str, Any]) -> None:
        self.function = function
        self.options = dict(options)
        self.config = resolve(None, options)
        self.why = "verify was asked for" if self.config.verify else ""
        self.proof: Proof | None = None
        self.calls = 0
        self.proven = -1  # the call in which the proof was made
        self.lanes: Lanes | None = None
        self.few: list[list[torch.Tensor]] = []  # the leading ones of each group
        self.compiled: Callable[..., Any] | None = None
        #: may lanes of other sizes lead each other?
        self.loose = True
        self.surveys = 0
        self.generation = 0
        self.noticed = Noticed()
        self.quiet = False
        self.entered = 0
        self.found = Found([])  # the tensors of lanes that are led, in this call
        self.steps: list[LedStep] = []
        # the state of the leading ones, for these lanes, and the dicts it had then
        self._few: Any = {}
        self._few_of: Lanes | None = None
        self._few_known: list[Any] = []
        self.optimizer: Any = None  # during a call

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
        entered = self.entered
        self.calls += 1
        self.optimizer = optimizer
        try:
            for _ in range(2):
                try:
                    if self.quiet:
                        self._step(optimizer, make)
                    else:
                        self.quiet = True
                        with collector_paused():
                            self._step(optimizer, make)
                    return True
                except Stale:
                    self._survey(optimizer)
            raise Unlike("its lanes change while it steps")
        except NotTraced:
            raise
        except REFUSALS as error:
            self.why = str(error).partition("\n")[0]
        except Exception as error:
            if self.entered != entered or compat.stance() == "fail_on_recompile":
                raise
            # whatever it is, the whole step says it again if it is the step's own
            reason = str(error).strip().partition("\n")[0]
            self.why = f"a few lanes cannot be traced: {type(error).__name__}: {reason}"
        finally:
            self.optimizer = None
            self.found = Found([])
        return False

    def _step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> None:
        if self.proof is None:
            self.prove()
        found = None if self.lanes is None else self._look(optimizer)
        if found is None:
            self._survey(optimizer)
            found = self._look(optimizer)
            if found is None:
                raise Unlike("its lanes are not what they seem")
        self.found = found
        self.noticed.look(optimizer)
        assert self.lanes is not None
        if self.compiled is None:
            self.few = [[] for _ in self.lanes.lists]
            for i in self.lanes.leads:
                self.few[self.lanes.groups[i]].append(self.lanes.params[i])
            self.compiled = make(self._backend())
            self.steps.clear()
        self._state = optimizer.state
        self._swap(optimizer)
        try:
            self.compiled(optimizer)
        finally:
            self._restore(optimizer)
        self._follow(optimizer)

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
        return lanes.look(optimizer, self.steps[-1].helper if self.steps else None)

    def _survey(self, optimizer: Optimizer) -> None:
        self.surveys += 1
        if self.surveys > PATIENCE:
            raise Unlike("its lanes change too often")
        known = self.lanes
        assert self.proof is not None
        lanes = self.lanes = Lanes(optimizer, self.loose and not self.proof.sizes)
        self.generation += 1
        if len(lanes.leads) > SHARE * len(lanes.params):
            raise Unlike(
                f"{len(lanes.leads)} of its {len(lanes.params)} lanes are unlike"
            )
        same = known is not None and _grouping(known) == _grouping(lanes)
        if not same:
            self.compiled = None

    def _swap(self, optimizer: Optimizer) -> None:
        lanes = self.lanes
        assert lanes is not None
        # a key that is looked up is a call of Python: asked where anything changed
        if self._few_of is not lanes or not self._few_same():
            self._few = collections.defaultdict(dict)
            for i in lanes.leads:
                state = lanes.states[i]
                if state is not None:
                    self._few[lanes.params[i]] = state
            self._few_of = lanes
            self._few_known = list(self._few.values())
        self._before = [dict(lanes.states[i] or ()) for i in lanes.leads]
        optimizer.state = self._few
        for group, own in zip(optimizer.param_groups, self.few, strict=True):
            group["params"] = own

    def _few_same(self) -> bool:
        """Is the state of the leading ones the dicts that it was, nothing more?"""
        few, known = self._few, self._few_known
        return len(few) == len(known) and all(map(is_, few.values(), known))

    def _restore(self, optimizer: Optimizer) -> None:
        few, optimizer.state = optimizer.state, self._state
        if few is not self._few or not self._few_same():
            self._state.update(few)
        for group, own in zip(optimizer.param_groups, self.noticed.lists, strict=True):
            group["params"] = own

    # ---------------------------------------------------------------- Dynamo's side

    def _backend(self) -> Callable[..., Any]:
        # Dynamo keeps each backend that it was ever given
        owner = weakref.ref(self)

        def lead(gm: GraphModule, args: Sequence[Any]) -> Callable[..., Any]:
            self = owner()
            assert self is not None
            if len(self.steps) >= PATIENCE:
                raise Unlike("its step is traced too often")
            decision = decide(gm, list(args), compat.traces_step())
            if decision.parts or decision.whole != "update":
                raise Unlike(f"its graph is more than an update: {decision.why}")
            self.quiet = False
            made = LedStep(self, gm)
            self.steps.append(made)
            # Dynamo keeps what it is given with the code that calls it, and that code
            # is kept by the optimizer's step: it must not keep the optimizer's tensors
            return _Reference(made)

        lead._torchdynamo_orig_backend = BACKEND  # type: ignore[attr-defined]
        return lead

    def settle(self) -> None:
        """Give all lanes the state that tracing gave the leading ones."""
        optimizer, lanes = self.optimizer, self.lanes
        assert lanes is not None
        few = optimizer.state
        fresh = [
            kind
            for kind in lanes.kinds
            if not kind.has_state and few.get(lanes.params[kind.lead])
        ]
        if not fresh:
            return
        self._restore(optimizer)
        try:
            if not compat.initialize(optimizer):
                raise Unlike("tracing made state, and nothing says how")
            self.in_order(optimizer)
            now = Lanes(optimizer, lanes.loose)
            if _grouping(now) != _grouping(lanes):
                raise Unlike("lanes that were alike get unlike state")
            self.lanes = now
            self.generation += 1
            found = self._look(optimizer)
            if found is None:
                raise Unlike("its lanes are not what they seem")
            self.found = found
        finally:
            self._swap(optimizer)

    def in_order(self, optimizer: Optimizer) -> None:
        """Let the state have the order of the parameters, as a whole step gives it."""
        state = optimizer.state
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p in state:
                    state[p] = state.pop(p)

    def prove(self) -> None:
        """Raise Unlike unless the code that a step may run now treats lanes alike.

        Once in a call is enough, for nothing changes before the step has run.
        """
        if self.proof is None or self.proven != self.calls:
            lanes = self.lanes
            every = range(len(lanes.params)) if lanes is not None else ()
            known = lanes.tensors(every).values() if lanes is not None else ()
            self.proof = prove(self.function, self.optimizer, known)
            self.proven = self.calls
        if self.proof.why:
            raise Unlike(self.proof.why)
        if self.proof.sizes and self.lanes is not None and self.lanes.reshaped:
            raise Unlike("it reads sizes, in which lanes differ")

    # ---------------------------------------------------------------- afterwards

    def _as_before(self) -> bool:
        """Does each leading one's state hold what it held before the step?"""
        lanes = self.lanes
        assert lanes is not None
        for i, old in zip(lanes.leads, self._before, strict=True):
            now = lanes.states[i] or {}
            if len(now) != len(old) or not all(map(is_, now.values(), old.values())):
                return False
            if not all(map(is_, now, old)):
                return False
        return True

    def _follow(self, optimizer: Optimizer) -> None:
        """Give the lanes that are led what the step gave the leading ones' state."""
        lanes = self.lanes
        assert lanes is not None
        if self._few_same() and self._as_before():
            return
        made: dict[int, list[torch.Tensor]] = {}
        for step in self.steps:
            made.update(step.take())
        state = optimizer.state
        added = False
        for kind, old in zip(lanes.kinds, self._before, strict=True):
            p = lanes.params[kind.lead]
            if p not in state or not kind.others:
                continue
            now = state[p]
            if kind.has_state and tuple(now) == tuple(old):
                changed = [k for k, v in now.items() if v is not old[k]]
                if not changed:
                    continue
                if all(k in kind.numbers for k in changed):
                    for k in changed:
                        value = now[k]
                        for i in kind.others:
                            lanes.states[i][k] = value  # type: ignore[index]
                    continue
            places: dict[int, Any] = {id(p): (PARAM, "")}
            if p.grad is not None:
                places[id(p.grad)] = GRAD, ""
            places.update(
                (id(v), ("state", k))
                for k, v in old.items()
                if isinstance(v, torch.Tensor)
            )
            for m, i in enumerate(kind.others):
                q = lanes.params[i]
                added = added or q not in state
                own = state[q]
                given: dict[str, Any] = {}
                for key, value in now.items():
                    place = places.get(id(value))
                    if not isinstance(value, torch.Tensor):
                        given[key] = value
                    elif id(value) in made:
                        given[key] = made[id(value)][m]
                    elif place is None:
                        # made of nothing that lanes have: for all the same
                        given[key] = value.clone()
                    elif place[0] == "state":
                        given[key] = own[place[1]]
                    else:
                        given[key] = q if place[0] == PARAM else q.grad
                own.clear()
                own.update(given)
        if added:
            self.in_order(optimizer)


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
