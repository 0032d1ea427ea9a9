"""One of Dynamo's graphs of models -> the step of all lanes.

Before it first runs, and whenever something changed that no guard of Dynamo's covers,
the step is rehearsed (see rehearsal). Then what was captured is extended, planned and
bound to the tensors of all lanes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture import Captured, capture
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.session import session
from ..compiler.timing import Clock
from ..config import Config
from ..errors import FuseoptError
from ..runtime.commit import Pending
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.lanes import GRAD, Lanes, Unlike
from ..shadow.state_guard import StateGuard
from ..uniformity import Proof
from .around import Around, finished, order_of, splice
from .extend import COMMON, Extended, Layout, extend
from .models import Models
from .places import held_tensors, place_of
from .policy import WholeInstead
from .proofs import Proofs, Prover
from .rehearsal import beyond, rehearse_all, rehearse_fewer
from .results import OwnFloat, OwnInt, Results
from .source import Finds, LaneTensors

#: After so many rehearsals of one graph an optimizer is traced whole.
PATIENCE = 6
#: For so many sets of lanes what runs their step is kept, unless more are in turn.
KEPT = 8


class Fewer(FuseoptError):
    """What was traced of some models does not do for fewer; nothing was written yet."""


@dataclass(frozen=True)
class Task:
    """What is the same in all calls of an optimizer's step.

    `noticed`: what the optimizer holds besides its lanes. `pending`: where launches are
    put off. `told`: gets the optimizer's Reports. `parts`: lanes are parts of
    tensors. `around`: what stands around the step, in the same launch.
    """

    function: Callable[..., Any]
    config: Config
    noticed: StateGuard
    pending: Pending
    told: list[Report]
    parts: bool = False
    around: Around | None = None


class Owner(Finds, Prover, Protocol):
    """What a graph asks of those who have the lanes in hand."""

    @property
    def lanes(self) -> Lanes | None:
        """The optimizer's, as they are known; another object where they changed."""

    @property
    def models(self) -> Models:
        """What stands for the kinds of lanes that Dynamo traced."""

    @property
    def active(self) -> tuple[int, ...]:
        """The models that Dynamo was given, by number."""

    #: the graph that ran last
    stepped: LedStep | None
    apart: Callable[[], None] | None  #: Unlike where some may not be stepped alone
    kept: int  #: for so many sets of lanes what runs their step is kept

    def shadow_of_all(self) -> Any:
        """What a rehearsal is to take for the optimizer."""

    def settle(self) -> None:
        """Have state ready for lanes where tracing made some for models."""

    def survey_holds(self) -> None:
        """Raise Stale unless lanes that were alike still are."""


class _Program(NamedTuple):
    """A step for some lanes of each model: what runs it, what it gives, and what
    integers it asks of lanes.
    """

    step: CompiledStep
    results: Results
    asked: list[tuple[int, str]]


class LedStep:
    """One of Dynamo's graphs of the models, called in its place."""

    def __init__(self, owner: Owner, task: Task, gm: GraphModule) -> None:
        self.owner = owner
        self.task = task
        self.gm = gm
        self.active = owner.active
        #: those that the program is for
        self.lanes: Lanes | None = None
        #: for which of what the optimizer held it was rehearsed: by count, by contents
        self.known = -1
        self.rehearsed: list[Any] = []
        #: for these parameters of each group, by identity
        self.lists: list[list[int]] = []
        self.proofs = Proofs()  # of these and others
        #: and with which models among the rest, for the last of these
        self.present: set[Any] = set()
        self._elsewhere: dict[str, tuple[list[Any], set[Any]]] = {}  # by other lists
        self.program: _Program | None = None
        #: by the lanes of each model, the last ones
        self.programs: dict[Any, _Program] = {}
        #: the step of the models, once it is
        self.captured: Captured | None = None
        self.told = False
        self.untold: list[Report] = []  # of plans that have not run
        #: tensors of models that are arguments for what stands around the step
        self.given: list[torch.Tensor] | None = None
        self.numbers = compat.number_sources(gm)
        # of what moves besides, Dynamo guards what the step asks of it
        names = [*self.numbers.values(), *compat.symbol_sources()]
        self.moving = frozenset(place for place in map(place_of, names) if place)

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The compiled helper, once a plan has it."""
        return None if self.program is None else self.program.step.helper

    def take(self) -> dict[int, dict[int, torch.Tensor]]:
        """What the last call made, by its token and by lane."""
        return {} if self.program is None else dict(self.program.results.clear())

    def number(self, own: OwnInt | OwnFloat, m: int) -> Any:
        """A number that the last call has for lane m of a model."""
        assert self.program is not None
        bound = self.program.step.program.bound
        assert bound is not None
        assert bound.numbers is not None
        return self.program.results.number(own, m, bound.numbers)

    def forget(self) -> None:
        """Take nothing for known that a call leaves to the next: one was cut off."""
        for program in self.programs.values():
            program.results.clear()
            program.step.forget()

    def drop(self) -> None:
        """Lanes are other than they seemed: no program is for them."""
        self.programs.clear()
        self.program = self.lanes = self.captured = None
        self.told = False

    def __call__(self, *args: Any) -> Any:
        owner, noticed = self.owner, self.task.noticed
        call = owner.call
        if self.task.around is not None:
            args = self._with_others(args, self.task.around)
        if not (
            self.lanes is owner.lanes
            and self.program is not None
            and self.known == noticed.count
            and noticed.moved <= self.moving
        ):
            self._prepare(args)
        program = self.program
        assert program is not None
        call.entered = True
        owner.stepped = self
        if program.asked:
            counters = call.found.counters
            args = *args, *[counters[place] for place in program.asked]
        return program.step(*args)

    def _with_others(self, args: tuple[Any, ...], around: Around) -> tuple[Any, ...]:
        """The arguments, and those for what stands around the step."""
        owner = self.owner
        shared = owner.call.aside.shared
        if self.given is None:
            given = self.gm, args, owner.models, self.active, around, shared
            self.given = splice(*given)
        return *args, *self.given, *shared

    def _prepare(self, args: Sequence[Any]) -> None:
        """Have a program for the lanes as they are, and proof that it does as they."""
        owner, noticed = self.owner, self.task.noticed
        call = owner.call
        call.put_gradients()
        if owner.lanes is not self.lanes and not call.surveyed:
            # what lies in the memory of lanes has been compared with no plan's yet
            owner.survey_holds()
        owner.settle()
        lanes = owner.lanes
        assert lanes is not None
        if self.lanes is not lanes:
            self.program = None
            self.lanes = lanes
        members = owner.models.members(lanes)
        if self.lists != lanes.lists_of():
            self._turn_to(lanes.lists_of())
        clock = Clock()
        failed = None
        if self.program is None:
            call.quiet = False
            # before the rehearsal, which goes on while compilers run
            try:
                self.program = self._program(args, members, clock)
            except Exception as error:
                failed = error
                self._tell(error, args)
        held = noticed.held(self.moving)
        present = tuple(k for k, own in enumerate(members) if own)
        try:
            if held not in self.rehearsed:
                self._rehearse(lanes, args, clock)
                if self.rehearsed:
                    # Dynamo's guards held: the step, which is proven to treat lanes
                    # alike, asks of these numbers nothing that has changed
                    self.moving |= noticed.moved
                self.rehearsed.append(noticed.held(self.moving))
                self.present = {present}
            if present not in self.present:
                self._rehearse_fewer(lanes, present)
                self.present.add(present)
        except Unlike as error:
            if set(owner.models.active(present)) < set(self.active):
                raise Fewer(str(error)) from error
            raise
        if failed is not None:
            raise failed
        self.known = noticed.count
        if self.untold:
            # what is planned for other lanes says the same
            self.told = True
            session.reports += self.untold
            self.task.told.extend(self.untold)
            self.untold.clear()

    def _turn_to(self, lists: list[list[int]]) -> None:
        """Other parameters have their turn: take what is known of the step of these."""
        kept = self._elsewhere
        if self.owner.apart is not None:
            kept[repr(self.lists)] = self.rehearsed, self.present
            if len(kept) > self.owner.kept:
                del kept[next(iter(kept))]
        self.lists = lists
        self.rehearsed, self.present = kept.pop(repr(lists), ([], set()))

    def _rehearse(self, lanes: Lanes, args: Sequence[Any], clock: Clock) -> None:
        owner = self.owner
        if len(self.rehearsed) >= PATIENCE:
            raise Unlike("what it depends on changes too often")
        owner.call.quiet = False
        clock.resume()
        proof = self._proof()
        given = [x for i, x in enumerate(args) if i in self.numbers]
        owner.models.renew(lanes)
        models, at = owner.models.lanes(owner.call.optimizer, self.active)
        function, parts = self.task.function, self.task.parts
        all_ = owner.shadow_of_all
        rehearse_all(all_, function, lanes, models, at, proof, given, parts)
        if owner.apart is not None:
            owner.apart()
        clock.lap("rehearsal")

    def _proof(self) -> Proof:
        owner = self.owner
        if owner.apart is None:
            return owner.prove()
        held = self.task.noticed.held(self.moving)
        return self.proofs.proof(owner, owner.call.optimizer, held)

    def _rehearse_fewer(self, lanes: Lanes, present: Sequence[int]) -> None:
        owner = self.owner
        owner.call.quiet = False
        owner.models.renew(lanes)
        models, at = owner.models.lanes(owner.call.optimizer, self.active)
        some = sorted(at[k] for k in owner.models.active(present) if k in at)
        rehearse_fewer(owner.shadow_of_all, self.task.function, models, some)

    def _tell(self, error: Exception, args: Sequence[Any]) -> None:
        """Tell of an error of fuseopt's own; raises Unlike then."""
        if internal_errors.is_mishap(error):
            given = error, self.gm, args, self.task.config
            said = internal_errors.tell(*given, "The step is traced whole.")
            raise Unlike(said) from error

    def _program(
        self, args: Sequence[Any], members: list[list[int]], clock: Clock
    ) -> _Program:
        """What runs the step for some lanes of each model, made if need be."""
        lanes = self.lanes
        assert lanes is not None
        key = repr((lanes.lists_of(), members, [kind.model for kind in lanes.kinds]))
        found = self.programs.pop(key, None)
        if found is None:
            found = self._extended(args, members, lanes, clock)
        while len(self.programs) >= self.owner.kept:
            del self.programs[next(iter(self.programs))]
        self.programs[key] = found
        return found

    def _extended(
        self,
        args: Sequence[Any],
        members: list[list[int]],
        lanes: Lanes,
        clock: Clock,
    ) -> _Program:
        models = self.owner.models
        positions = [k for k, x in enumerate(args) if isinstance(x, torch.Tensor)]
        graph_tensors = GraphTensors(self.gm, positions)
        own_tensors = graph_tensors.tensors(args)
        roles = self._roles(own_tensors, args)
        owners = [model for model, _ in roles]
        # arguments: gradients, and the tensors in which Dynamo hands over numbers
        known = {*map(id, self.given or ())}
        late = frozenset(
            s
            for s, (_, (role, _)) in enumerate(roles)
            if role == GRAD
            or (s >= len(roles) - len(positions) and id(own_tensors[s]) not in known)
        )
        led = {model: len(own) for model, own in enumerate(members)}
        layouts = _layouts(models, members, lanes)
        counted = {
            k: models.counted[x]
            for k, x in enumerate(args)
            if type(x) is int and x in models.counted and _is_state(self.numbers.get(k))
        }
        given = {k: model for k, (model, _) in counted.items()}
        found: list[tuple[Extended, Results]] = []
        aside, around = self.owner.call.aside, self.task.around
        beside = order_of(lanes, aside.columns, around)
        flag = None
        if aside.flag is not None:
            flag = [*map(id, own_tensors)].index(id(aside.flag))

        def extended(gm: GraphModule, args: Sequence[Any]) -> Captured:
            captured = self.captured
            if captured is None:
                filled = models.fill()
                captured = self.captured = capture(gm, args)
                if filled:
                    models.empty()
            if captured.complexes:
                raise Unlike("it computes with complex numbers")
            if captured.given:
                raise Unlike("it gives tensors other memory")
            if captured.aliases:
                raise Unlike("it keeps another view of a tensor of a lane")
            if captured.beyond and self.task.parts:
                raise Unlike(beyond(captured.beyond))
            made = extend(captured, owners, led, late, layouts, given, len(args))
            results = Results(captured, made, own_tensors, members)
            found.append((made, results))
            complete = made.captured
            if around is not None:
                complete = finished(around, made, roles, flag)
            return replace(complete, result=results.result)

        def tell(report: Report) -> None:
            report.traced = (
                f"{len(self.active)} of {len(lanes.params)} lanes; the others do as "
                "these"
            )
            if not self.told:
                self.untold[:] = [report]

        config, pending = self.task.config, self.task.pending
        first = not self.told
        plan = pipeline.replanner(self.gm, config, tell, clock, extended, first)
        program = plan(args)
        made, results = found[-1]
        place = {**beside}
        place.update((x, len(beside) + k) for k, x in enumerate(lanes.places()))
        order = [
            s if m == COMMON else len(roles) + place[members[owners[s]][m], roles[s][1]]
            for s, m in made.order
        ]
        asked = [(members[given[k]][m], counted[k][1]) for k, m in made.asked]
        lane_of = [lane for lane, (role, _) in sorted(place) if role == GRAD]
        where = {x: i for i, x in enumerate(order)}
        at = [where.get(len(roles) + place[i, (GRAD, "")]) for i in lane_of]
        policy = WholeInstead(self._tell)
        n = len(roles), len(beside)
        source = LaneTensors(graph_tensors, order, *n, self.owner, at)
        take = results.take
        step = CompiledStep(source, program, plan, policy, None, pending, take)
        return _Program(step, results, asked)

    def _roles(
        self, tensors: Sequence[torch.Tensor], args: Sequence[Any]
    ) -> list[tuple[int, tuple[str, str]]]:
        """Of the graph's tensors, which model each belongs to and what it is there.

        Raises Unlike for one that belongs to none and is not known to be the same for
        all.
        """
        if len({*map(id, tensors)}) < len(tensors):
            raise Unlike("lanes have a tensor in common")
        roles = self.owner.models.roles()
        # besides lanes' only what the dry run knows: what the optimizer holds, and the
        # tensors in which Dynamo hands over numbers
        shared = {id(t) for t in held_tensors(self.owner.shadow_of_all())}
        shared.update(id(args[i]) for i in self.numbers)
        shared.update(map(id, self.owner.call.aside.shared))
        for t in tensors:
            if id(t) not in roles and id(t) not in shared:
                raise Unlike("its graph has a tensor that belongs to no lane")
        return [roles.get(id(t), (COMMON, ("", ""))) for t in tensors]


def _is_state(source: str | None) -> bool:
    """Is what Dynamo names so within the state of a parameter?"""
    return source is not None and source.startswith("L['self'].state[")


def _layouts(
    models: Models, members: Sequence[Sequence[int]], lanes: Lanes
) -> dict[int, list[Layout]]:
    """Of models whose lanes have other sizes: theirs, then those of their lanes."""
    found = {}
    for model, own in enumerate(members):
        every = [models.params[model], *(lanes.params[i] for i in own)]
        if len({p.shape for p in every}) > 1:
            found[model] = [(tuple(p.shape), p.stride()) for p in every]
    return found
