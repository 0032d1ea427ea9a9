"""One of Dynamo's graphs of the leading lanes -> the step of all lanes.

Before it first runs, and whenever something changed that no guard of Dynamo's covers,
the step is rehearsed (`compare` says of what must agree). Then what was captured is
extended, planned and bound to the tensors of all lanes.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture import Captured
from ..capture.fx.inputs import static_tensors
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.session import session
from ..compiler.timing import Clock
from ..config import Config
from ..errors import FuseoptError
from ..runtime.commit import Pending
from ..runtime.guards.probe import CHANGED
from ..runtime.plan import Plan
from ..runtime.step import CompiledStep
from ..shadow.double import own_attributes
from ..shadow.lanes import GRAD, Found, Lanes, Unlike
from ..shadow.state_guard import Noticed, Place
from ..uniformity import Proof
from .dry_run import Record, rehearse
from .extend import COMMON, Extended, extend

#: After so many rehearsals of one graph an optimizer is traced whole.
PATIENCE = 6


class Stale(FuseoptError):
    """Lanes are other than they were surveyed to be; nothing was written yet."""


class Owner(Protocol):
    """What a step asks of those who have the lanes in hand.

    `entered` counts calls, `generation` surveys; `noticed`: what the optimizer holds
    besides its lanes; `quiet`: was nothing compiled or rehearsed in this call so far?
    `found` has the tensors of the lanes that are led, in this call. `settle()` has
    state ready for led lanes where tracing made some. `pending`: launches put off.
    `prove()` raises Unlike unless the code that the step may run now treats lanes
    alike; then `proof` says which code that is. `survey_holds()` raises Stale unless
    lanes that were alike still are.
    """

    @property
    def optimizer(self) -> Any:
        """What a rehearsal is to take for the optimizer."""

    function: Any
    config: Config
    lanes: Lanes | None
    proof: Proof | None
    entered: int
    generation: int
    noticed: Noticed
    quiet: bool
    found: Found
    pending: Pending
    told: list[Report]

    def settle(self) -> None: ...
    def prove(self) -> None: ...
    def survey_holds(self) -> None: ...


class LedStep:
    """One of Dynamo's graphs of the leading lanes, called in its place."""

    def __init__(self, owner: Owner, gm: GraphModule) -> None:
        self.owner = owner
        self.gm = gm
        self.generation = -1
        #: for which of what the optimizer held it was rehearsed: by count, by contents
        self.known = -1
        self.rehearsed: list[Any] = []
        self.inner: ExtendedStep | None = None
        self.untold: list[Report] = []  # of plans that have not run
        self.numbers = compat.number_sources(gm)
        self.moving = frozenset(
            place for place in map(_place, self.numbers.values()) if place
        )

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The compiled helper of its plan, once it has one."""
        return None if self.inner is None else self.inner.plan.helper

    def take(self) -> dict[int, list[torch.Tensor]]:
        """What the last call made for the lanes that are led, by the leading ones'."""
        if self.inner is None:
            return {}
        made, self.inner.made = self.inner.made, {}
        return made

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        if self.inner is not None:
            self.inner.made = {}
            self.inner.forget()

    def __call__(self, *args: Any) -> Any:
        owner = self.owner
        noticed = owner.noticed
        if (
            self.generation == owner.generation
            and self.inner is not None
            and self.known == noticed.count
            and noticed.moved <= self.moving
        ):
            owner.entered += 1
            return self.inner(*args)
        if self.inner is None:
            # what lies in the memory of lanes has been compared with no plan's yet
            owner.survey_holds()
        owner.settle()
        if self.generation != owner.generation:
            self.rehearsed.clear()
            self.inner = None
            self.generation = owner.generation
        held = noticed.held(self.moving)
        inner, failed = self.inner, None
        clock = Clock()
        if inner is None:
            owner.quiet = False
            # before the rehearsal, which goes on while compilers run
            try:
                inner = self._extended(args, clock)
            except Exception as error:
                failed = error
                self._failed(error, args)
        if held not in self.rehearsed:
            if len(self.rehearsed) >= PATIENCE:
                raise Unlike("what it depends on changes too often")
            owner.quiet = False
            clock.resume()
            self._rehearse(args)
            clock.lap("rehearsal")
            self.rehearsed.append(held)
        if failed is not None:
            raise failed
        assert inner is not None
        self.inner = inner
        self.known = noticed.count
        session.reports += self.untold
        owner.told += self.untold
        self.untold.clear()
        # what goes wrong before this is no reason to stop: the step is traced whole
        owner.entered += 1
        return inner(*args)

    def _failed(self, error: Exception, args: Sequence[Any]) -> bool:
        """Tell of an error of fuseopt's own; raises Unlike then."""
        if not internal_errors.is_mishap(error):
            return False
        config = self.owner.config
        said = internal_errors.tell(
            error, self.gm, args, config, "The step is traced whole."
        )
        raise Unlike(said) from error

    def _rehearse(self, args: Sequence[Any]) -> None:
        """Raise Unlike unless all lanes do as the one that leads them."""
        owner = self.owner
        owner.prove()
        lanes, proof = owner.lanes, owner.proof
        assert lanes is not None
        assert proof is not None
        every = range(len(lanes.params))
        given = [x for i, x in enumerate(args) if i in self.numbers]
        moving = {x.item() if isinstance(x, torch.Tensor) else x for x in given}

        def moved(x: Any) -> Any:
            """A number a little beside that of this call, if it may be another."""
            if isinstance(x, torch.Tensor) or x in moving:
                if isinstance(x, int):
                    return x + 1
                value = float(x)
                return value * (1 + 2**-10) if value else 2**-10
            return x

        for perturb in (None, moved):
            runs = [
                rehearse(owner.optimizer, owner.function, lanes, members, perturb)
                for members in (every, lanes.leads)
            ]
            compare(lanes, *runs)
            strange = {code for code, _, _ in runs[0].paths} - proof.codes
            if strange:
                raise Unlike(f"it runs {strange.pop().co_name}, which was not foreseen")
            # torch's own code chooses by what it reads within the graph alone
            if not moving and not (runs[0].reads and runs[0].paths):
                break

    def _extended(self, args: Sequence[Any], clock: Clock) -> ExtendedStep:
        owner, gm = self.owner, self.gm
        lanes = owner.lanes
        assert lanes is not None
        own = [*static_tensors(gm).values()]
        statics = len(own)
        own += [x for x in args if isinstance(x, torch.Tensor)]
        if len({*map(id, own)}) < len(own):
            raise Unlike("lanes have a tensor in common")
        leading = lanes.tensors(lanes.leads)
        apart(leading.values())
        roles = {id(t): place for place, t in leading.items()}
        # besides lanes' only what the dry run knows: what the optimizer holds, and the
        # tensors in which Dynamo hands over numbers
        shared = {id(t) for t in held_tensors(owner.optimizer)}
        shared.update(id(args[i]) for i in self.numbers)
        known = []
        for t in own:
            if id(t) not in roles and id(t) not in shared:
                raise Unlike("its graph has a tensor that belongs to no lane")
            known.append(roles.get(id(t), (COMMON, ("", ""))))
        source = [lane for lane, _ in known]
        # arguments: gradients, and the tensors in which Dynamo hands over numbers
        late = frozenset(
            s for s, (_, (role, _)) in enumerate(known) if s >= statics or role == GRAD
        )
        others = {kind.lead: kind.others for kind in lanes.kinds}
        led = {lead: len(own) for lead, own in others.items()}
        layouts = {
            lead: [
                (tuple(lanes.params[i].shape), lanes.params[i].stride())
                for i in (lead, *others[lead])
            ]
            for lead in lanes.reshaped
        }
        found: list[Extended] = []
        clocks = [clock]
        self.untold.clear()

        def extended(captured: Captured) -> Captured:
            if captured.complexes:
                raise Unlike("it computes with complex numbers")
            if captured.given:
                raise Unlike("it gives tensors other memory")
            if captured.aliases:
                raise Unlike("it keeps another view of a tensor of a lane")
            found.append(extend(captured, source, led, late, layouts))
            return found[-1].captured

        def plan(graph: GraphModule, now: Sequence[Any]) -> Plan:
            spent = clocks.pop() if clocks else None
            made, report = pipeline.plan_graph(
                graph, now, owner.config, clock=spent, extend=extended
            )
            report.traced = (
                f"{len(lanes.leads)} of {len(lanes.params)} lanes; the others do as "
                "these"
            )
            told = self.untold if self.inner is None else session.reports
            told.append(report)
            assert made is not None
            return made

        step = ExtendedStep(gm, plan, args)
        step.failed = self._failed
        place = {x: k for k, x in enumerate(lanes.places())}
        step.arguments = [k for k, x in enumerate(args) if isinstance(x, torch.Tensor)]
        picked = [
            s if m == COMMON else len(own) + place[others[source[s]][m], known[s][1]]
            for s, m in found[-1].order
        ]
        step.pick = itemgetter(*picked)
        step.picked = picked
        step.copies = found[-1].copies
        step.owner = owner
        step.pending = owner.pending
        return step


def compare(lanes: Lanes, full: Record, cut: Record) -> None:
    """Raise Unlike unless led lanes do as their lead, and that as it does alone."""
    if full.shared != cut.shared or full.rest != cut.rest:
        raise Unlike("what the step does to all lanes depends on how many there are")
    if not full.paths <= cut.paths:
        raise Unlike("the step takes ways for some lanes that it takes for no lead")
    if not set(cut.lanes) <= set(lanes.leads):
        raise Unlike("the step reaches parameters that are not in its groups")
    for kind in lanes.kinds:
        lead = kind.lead
        calls, state = full.lanes.get(lead, []), full.states[lead]
        if calls != cut.lanes.get(lead, []) or state != cut.states[lead]:
            raise Unlike("what the step does to a lane depends on the others")
        for i in kind.others:
            if full.lanes.get(i, []) != calls or full.states[i] != state:
                raise Unlike(
                    f"lanes {lead} and {i} look alike, and the step treats them "
                    "in different ways"
                )


_SOURCE = re.compile(
    r"L\['self'\]\.(?:param_groups\[(\d+)\]\['(\w+)'\]|(\w+))(?:\[(\d+)\])?"
)


def _place(source: str) -> Place | None:
    """Where a number lies that Dynamo names so; None: elsewhere."""
    found = _SOURCE.fullmatch(source)
    if not found:
        return None
    group, key, name, item = found.groups()
    place: Place = name if group is None else (int(group), key)
    return place if item is None else (place, int(item))


def held_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer holds besides its lanes."""
    waiting: list[Any] = list(own_attributes(optimizer).values())
    for group in optimizer.param_groups:
        waiting += [v for k, v in group.items() if k != "params"]
    while waiting:
        x = waiting.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, (list, tuple)):
            waiting += x


def apart(tensors: Iterable[torch.Tensor]) -> None:
    """Raise Unlike if two of these lie in the same memory.

    What a lane does to one of its tensors would be seen in the other, in lanes that
    share no memory as well.
    """
    reached = 0
    for first, last in sorted(_range(t) for t in tensors if t.numel()):
        if first < reached:
            raise Unlike("a lane that leads has two tensors in the same memory")
        reached = last


def _range(t: torch.Tensor) -> tuple[int, int]:
    start = t.data_ptr()
    steps = zip(t.shape, t.stride(), strict=True)
    return start, start + t.itemsize * (1 + sum((n - 1) * s for n, s in steps))


class ExtendedStep(CompiledStep):
    """The step of all lanes, called with the tensors of the leading ones."""

    owner: Owner
    arguments: list[int]
    pick: itemgetter[Any]
    picked: list[int]
    copies: Mapping[tuple[int, int], int]

    def __init__(self, *args: Any) -> None:
        self.made: dict[int, list[torch.Tensor]] = {}
        super().__init__(*args)

    def _given(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return {}, {}, self._picked(args)

    def _look(self, plan: Plan, args: Sequence[Any]) -> tuple[int, Any]:
        found, probe = self.owner.found, plan.probe
        if probe is None or found.watch is None or not plan.settled:
            return super()._look(plan, args)
        if probe.holder is found.watch:
            given = [*self._own(args), *found.grads]
            return probe.look_again(given), given
        seen, given = super()._look(plan, args)
        # all but the gradients are the watch's, which keeps them
        own = len(self._own(args))
        at = {own + place: own + k for place, k in found.late}
        at |= {k: k for k in range(own)}
        late = [(i, at[s]) for i, s in enumerate(self.picked) if s in at]
        probe.hold(found.watch, late, own + len(found.grads))
        return seen, given

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        return list(self._picked(args))

    def _tensor(self, args: Sequence[Any], i: int) -> Any:
        own, place = self._own(args), self.picked[i]
        return own[place] if place < len(own) else self._tensors(args)[i]

    def _own(self, args: Sequence[Any]) -> list[Any]:
        """The tensors of the leading lanes, and those that all lanes share."""
        gm = self.gm
        own = [*gm._buffers.values(), *gm._parameters.values()]
        return own + [args[i] for i in self.arguments]

    def _picked(self, args: Sequence[Any]) -> tuple[Any, ...]:
        every = self._own(args) + self.owner.found.tensors()
        picked: tuple[Any, ...] = self.pick(every)
        return picked

    def _adapt(
        self, found: int, tensors: list[Any], args: Sequence[Any]
    ) -> Plan | None:
        known = self.plan.metadata
        if known:
            now = [(t.dtype, t.shape, t.device) for t in tensors]
            # without a probe nothing is known of the last call, which was cut off
            if (found & CHANGED and self.plan.probe is not None) or now != known:
                raise Stale
        return super()._adapt(found, tensors, args)

    def _realias(
        self, args: Sequence[Any], tensors: list[torch.Tensor], ptrs: list[int]
    ) -> Plan | None:
        raise Unlike("lanes share memory")

    def _result(
        self, plan: Plan, args: Sequence[Any], tensors: list[Any], memory: Any
    ) -> Any:
        result = super()._result(plan, args, tensors, memory)
        self.made = {}
        for (b, m), copy in self.copies.items():
            if plan.captured.graph.buffers[b].kind == "temp":
                own = self.made.setdefault(id(memory.tensor(b)), [])
                assert len(own) == m
                own.append(memory.tensor(copy))
        return result
