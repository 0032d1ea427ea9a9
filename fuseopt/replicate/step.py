"""Run the step of all lanes in place of one of Dynamo's graphs of their models.

fuseopt rehearses the step before its first run, and after a change that no guard of
Dynamo's covers (see rehearsal). It extends the captured graph to all lanes, plans it,
and binds it to their tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from .. import compat
from ..capture import Captured, capture
from ..compiler import internal_errors, pipeline
from ..compiler.report import Report
from ..compiler.session import session
from ..compiler.timing import Clock
from ..errors import FuseoptError
from ..inputs.keys import GRAD, LanesDiffer
from ..inputs.lanes import Lanes
from ..inputs.policy import RefusingPolicy, survey_again
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..uniformity import Proof
from .extend import COMMON, Extended, extend
from .packed import without_memory
from .places import held_tensors, is_state, place_of
from .programs import Program, Programs, Where, may_leave_out
from .proofs import Proofs
from .rehearsal import beyond, in_order, order_of_kinds, rehearse_all, rehearse_fewer
from .results import OwnFloat, OwnInt, Results
from .source import LaneTensors
from .step_wrapper import finished, order_of, splice
from .task import Owner, Task

#: The number of rehearsals of one graph after which an optimizer is traced whole.
PATIENCE = 6
#: The number of sets of lanes with programs to keep, unless an owner needs more.
KEPT = 8


class RetraceFewerModels(FuseoptError):
    """A trace of some models is not valid for fewer; it has written nothing yet."""


class LedStep:
    """One of Dynamo's graphs of the models; it runs the step of all lanes instead."""

    def __init__(self, owner: Owner, task: Task, gm: GraphModule) -> None:
        self.owner = owner
        self.task = task
        self.gm = gm
        self.active = owner.active
        #: the lanes of `program`
        self.lanes: Lanes | None = None
        #: `state_guard.count` at the last check; contents with a rehearsal
        self.known = -1
        self.rehearsed: list[Any] = []
        #: the ids of each group's parameters, for which `rehearsed` and `present` hold
        self.lists: list[list[int]] = []
        #: proofs of its code, for these and other lanes
        self.proofs = Proofs()
        #: the models, in order, that have a rehearsal with the last contents
        self.present: set[Any] = set()
        #: (known, rehearsed, present) of other lists of parameters
        self._elsewhere: dict[str, tuple[int, list[Any], set[Any]]] = {}
        self.program: Program | None = None
        self.programs = Programs()
        #: True if the graph gets calls around the step
        self.completed = task.wrapper is not None or task.packing is not None
        #: True if each set of lanes needs its own program
        self.each = task.wrapper is not None
        #: models whose sets of lanes each need their own program
        self._each_of: set[tuple[int, ...]] = set()
        #: the captured step of the models
        self.captured: Captured | None = None
        self.reported = False
        self.unreported: list[Report] = []  # of plans that have not run
        #: tensors of models that were added to the graph's arguments for `wrapper`
        self.given: list[torch.Tensor] | None = None
        self.numbers = compat.number_sources(gm)
        # Dynamo guards the step's branches on these numbers; their values may change
        names = [*self.numbers.values(), *compat.symbol_sources()]
        self.moving = frozenset(place for place in map(place_of, names) if place)

    @property
    def helper(self) -> ctypes.PyDLL | None:
        """The library of the guards, once a plan has it."""
        return None if self.program is None else self.program.step.helper

    def take(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return the tensors that the last call created, by token and by lane."""
        return {} if self.program is None else dict(self.program.results.clear())

    def own_numbers(self, stand_in: OwnInt | OwnFloat) -> list[Any]:
        """Return the number that the last call has for each lane of a model."""
        assert self.program is not None
        bound = self.program.step.program.bound
        assert bound is not None
        assert bound.numbers is not None
        return self.program.results.of_lanes(stand_in, bound.numbers)

    def forget(self) -> None:
        """Compare nothing with the last call, which was interrupted."""
        for program in self.programs:
            program.results.clear()
            program.step.forget()

    def drop(self, reported: bool = False) -> None:
        """Drop all programs, after lanes changed, or before another survey of them.

        `reported`: True if its Report has been added.
        """
        self.programs.clear()
        self.program = self.lanes = self.captured = None
        self.reported = reported

    def __call__(self, *args: Any) -> Any:
        owner = self.owner
        call = owner.call
        if self.completed:
            args = self._with_others(args)
        same = self.program is not None and self.lanes is owner.lanes
        if not (same and self._is_checked()) and not self._takes_part():
            self._prepare(args)
        program = self.program
        assert program is not None
        call.entered = True
        owner.stepped = self
        if program.counted:
            counters = call.found.counters
            args = *args, *map(counters.__getitem__, program.turn.counters)
        return program.step(*args)

    def _with_others(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments, and those for the calls around the step."""
        owner, task = self.owner, self.task
        shared = owner.call.tail_arguments.shared
        if self.given is None:
            inputs = self.gm, args, owner.models, self.active
            self.given = splice(*inputs, task.wrapper, shared)
        return *args, *self.given, *shared

    def _is_checked(self) -> bool:
        """Does the optimizer, except for numbers, hold what the last check found?"""
        state_guard = self.task.state_guard
        return self.known == state_guard.count and state_guard.moved <= self.moving

    def _takes_part(self) -> bool:
        """Switch to the program of a home, for its lanes that have a gradient now.

        Returns False if a call needs more preparation.
        """
        lanes, program = self.owner.lanes, self.program
        assert lanes is not None
        if program is None or lanes.home is None or program.home is not lanes.home:
            program = self.programs.at(lanes.home)
            if program is None or not program.step.compares:
                return False
            self._turn_to(lanes.lists_of())
        if not self._is_checked() or order_of_kinds(lanes) not in self.present:
            return False
        program.take_part(lanes)
        self.program, self.lanes = program, lanes
        return True

    def _prepare(self, args: Sequence[Any]) -> None:
        """Make a program for the current lanes, and rehearse it if necessary."""
        owner, state_guard = self.owner, self.task.state_guard
        call = owner.call
        call.put_gradients()
        if owner.lanes is not self.lanes and not call.surveyed and not self._guarded():
            # no guard of a plan has compared the metadata of these lanes
            owner.survey_holds()
        owner.settle()
        lanes = owner.lanes
        assert lanes is not None
        if self.lanes is not lanes:
            self.program = None
            self.lanes = lanes
        members = owner.models.members(lanes)
        self._turn_to(lanes.lists_of())
        clock = Clock()
        failed = None
        if self.program is None:
            call.compiled_nothing = False
            # before the rehearsal, which runs beside the compilers
            try:
                self.program = self._program(args, members, clock)
            except Exception as error:
                failed = error
                self._report_error(error, args)
        contents = state_guard.held(self.moving)
        present = order_of_kinds(lanes)
        try:
            if contents not in self.rehearsed:
                self._rehearse(lanes, args, clock)
                if self.rehearsed:
                    # Dynamo's guards held: the step takes the same branches on these
                    # numbers, and the proof covers all lanes
                    self.moving |= state_guard.moved
                self.rehearsed.append(state_guard.held(self.moving))
                self.present = {present}
            if present not in self.present:
                self._rehearse_fewer(lanes, present)
                self.present.add(present)
        except LanesDiffer as error:
            if set(owner.models.active(sorted(present))) < set(self.active):
                raise RetraceFewerModels(str(error)) from error
            raise
        if failed is not None:
            raise failed
        self.known = state_guard.count
        program = self.program
        if lanes.home is None and program is not None:
            home = self.programs.home_of(program, lanes, owner.models)
            if home is not None:
                owner.live_in(home)
            if home is lanes and program.lives_in(home):
                program.take_part(lanes)
        if self.unreported:
            # a plan for other lanes would give the same report
            self.reported = True
            session.reports += self.unreported
            self.task.reports.extend(self.unreported)
            self.unreported.clear()

    def _guarded(self) -> bool:
        """Did a plan's guard compare the tensors of these lanes in another call?"""
        lanes, models = self.owner.lanes, self.owner.models
        assert lanes is not None
        program = self.programs.find(lanes, models.members(lanes))
        return program is not None and program.step.compares

    def _turn_to(self, lists: list[list[int]]) -> None:
        """Switch to the rehearsals for other lists of parameters."""
        if lists == self.lists:
            return
        records = self._elsewhere
        if self.owner.bucket_proof is not None:
            records[repr(self.lists)] = self.known, self.rehearsed, self.present
            if len(records) > self.owner.kept:
                del records[next(iter(records))]
        self.lists = lists
        found = records.pop(repr(lists), (-1, [], set()))
        self.known, self.rehearsed, self.present = found

    def _rehearse(self, lanes: Lanes, args: Sequence[Any], clock: Clock) -> None:
        owner = self.owner
        if len(self.rehearsed) >= PATIENCE:
            raise LanesDiffer("its inputs change too often")
        owner.call.compiled_nothing = False
        clock.resume()
        proof = self._proof()
        numbers = [x for i, x in enumerate(args) if i in self.numbers]
        owner.models.renew(lanes)
        models, at = owner.models.lanes(owner.call.optimizer, self.active)
        arguments = owner.shadow_of_all, self.task.function, lanes, models, at, proof
        rehearse_all(*arguments, numbers, self.task.parts)
        if owner.bucket_proof is not None:
            owner.bucket_proof()
        clock.lap("rehearsal")

    def _proof(self) -> Proof:
        owner = self.owner
        if owner.bucket_proof is None:
            return owner.prove()
        held = self.task.state_guard.held(self.moving)
        return self.proofs.proof(owner, owner.call.optimizer, held)

    def _rehearse_fewer(self, lanes: Lanes, present: Sequence[int]) -> None:
        owner = self.owner
        owner.call.compiled_nothing = False
        owner.models.renew(lanes)
        models, at = owner.models.lanes(owner.call.optimizer, self.active)
        some = sorted(at[k] for k in owner.models.active(sorted(present)) if k in at)
        shadow, step = owner.shadow_of_all, self.task.function
        rehearse_fewer(shadow, step, models, some)
        if not in_order(present, at) and (proof := self._proof()).firsts:
            rehearse_all(shadow, step, lanes, models, at, proof, ())

    def _report_error(self, error: Exception, args: Sequence[Any]) -> bool:
        """Report an error within fuseopt, and raise LanesDiffer; return False for
        others.
        """
        if internal_errors.is_mishap(error):
            context = error, self.gm, args, self.task.config
            message = internal_errors.report(*context, "The step is traced whole.")
            raise LanesDiffer(message) from error
        return False

    def _program(
        self, args: Sequence[Any], members: list[list[int]], clock: Clock
    ) -> Program:
        """Return the program for these lanes, `members` of each model.

        Makes a new one if necessary.
        """
        lanes = self.lanes
        assert lanes is not None
        program = self.programs.find(lanes, members)
        if program is None:
            arguments = lanes, self.owner.models, members
            wide = members if self.each else self.programs.wider(*arguments)
            kinds = tuple(k for k, of_model in enumerate(wide) if of_model)
            if kinds in self._each_of:
                wide = members
            program = self._extended(args, wide, lanes, clock)
            if wide != members and not program.some:
                self._each_of.add(kinds)
                program = self._extended(args, members, lanes, clock)
            self.programs.add(program, self.owner.kept)
            program.turn_to(lanes, members)
        return program

    def _extended(
        self,
        args: Sequence[Any],
        members: list[list[int]],
        lanes: Lanes,
        clock: Clock,
    ) -> Program:
        models = self.owner.models
        positions = [k for k, x in enumerate(args) if isinstance(x, torch.Tensor)]
        graph_tensors = GraphTensors(self.gm, positions)
        graph_inputs = graph_tensors.tensors(args)
        roles = self._roles(graph_inputs, args)
        owners = [model for model, _ in roles]
        # arguments: gradients, and the tensors in which Dynamo passes numbers
        spliced = {*map(id, self.given or ())}
        late = frozenset(
            s
            for s, (_, (role, _)) in enumerate(roles)
            if role == GRAD
            or (s >= len(roles) - len(positions) and id(graph_inputs[s]) not in spliced)
        )
        led = {model: len(members_of) for model, members_of in enumerate(members)}
        layouts = models.layouts(members, lanes)
        counted = {
            k: models.counted[x]
            for k, x in enumerate(args)
            if type(x) is int and x in models.counted and is_state(self.numbers.get(k))
        }
        model_of_arg = {k: model for k, (model, _) in counted.items()}
        extensions: list[tuple[Extended, Results]] = []
        tail_arguments, wrapper = self.owner.call.tail_arguments, self.task.wrapper
        beside = order_of(lanes, tail_arguments.columns, wrapper)
        without = (t for k in self.active for t in models.packed(k)[1].values())
        ids = {*map(id, without)}
        hollow = frozenset(s for s, t in enumerate(graph_inputs) if id(t) in ids)
        flag = None
        if tail_arguments.flag is not None:
            flag = [*map(id, graph_inputs)].index(id(tail_arguments.flag))

        def extended(gm: GraphModule, args: Sequence[Any]) -> Captured:
            captured = self.captured
            if captured is None:
                filled = models.fill()
                captured = self.captured = capture(gm, args)
                if filled:
                    models.empty()
            if captured.complexes:
                raise LanesDiffer("it computes with complex numbers")
            if captured.given:
                raise LanesDiffer("it replaces the memory of tensors")
            if captured.aliases:
                raise LanesDiffer("it keeps another view of a tensor of a lane")
            if captured.beyond and self.task.parts:
                raise LanesDiffer(beyond(captured.beyond))
            if hollow:
                captured = without_memory(captured, hollow)
            extension = extend(
                captured, owners, led, late, layouts, model_of_arg, len(args), hollow
            )
            results = Results(captured, extension, graph_inputs, members)
            extensions.append((extension, results))
            complete = extension.captured
            if wrapper is not None:
                complete = finished(wrapper, extension, roles, flag)
            return replace(complete, result=results.result)

        def on_report(report: Report) -> None:
            n, all_lanes = len(self.active), len(lanes.params)
            report.traced = f"{n} of {all_lanes} lanes; they stand for the others"
            if n > all_lanes:
                report.traced = f"{n} models for {all_lanes} lanes; they stand for all"
            if not self.reported:
                self.unreported[:] = [report]

        config, pending = self.task.config, self.task.pending
        first = not self.reported
        plan = pipeline.replanner(self.gm, config, on_report, clock, extended, first)
        program = plan(args)
        extension, results = extensions[-1]
        if program.plan.at_once:
            # it launches before fuseopt checks its writes, which it may refuse
            raise LanesDiffer("it reads a number that the step computes from tensors")

        def where(s: int, m: int) -> Where:
            if m == COMMON:
                return s
            place = members[owners[s]][m], roles[s][1]
            return place if place not in beside else len(roles) + beside[place]

        n = len(roles), len(beside)
        order = [where(s, m) for s, m in extension.order]
        source = LaneTensors(graph_tensors, order, *n, self.owner)
        policy = RefusingPolicy("lanes share memory", survey_again, self._report_error)
        take = results.take
        step = CompiledStep(source, program, plan, policy, None, pending, take)
        counts = [
            (model_of_arg[k], m, counted[k][1]) for k, m in extension.lane_numbers
        ]
        parts_of = program.plan, extension, results, config, models
        some = not self.each and may_leave_out(*parts_of)
        like = self.programs.like(lanes, members)
        parts = lanes.lists_of(), members, order, counts, like, some
        return Program(step, source, results, *parts)

    def _roles(
        self, tensors: Sequence[torch.Tensor], args: Sequence[Any]
    ) -> list[tuple[int, tuple[str, str]]]:
        """Return the model and the role of each of the graph's tensors.

        Raises LanesDiffer for a tensor that neither a model has nor all lanes share.
        """
        if len({*map(id, tensors)}) < len(tensors):
            raise LanesDiffer("lanes share a tensor")
        roles = self.owner.models.roles()
        # shared are only tensors that the dry run has too: the optimizer's own, and
        # those in which Dynamo passes numbers
        shared = {id(t) for t in held_tensors(self.owner.shadow_of_all())}
        shared.update(id(args[i]) for i in self.numbers)
        shared.update(map(id, self.owner.call.tail_arguments.shared))
        for t in tensors:
            if id(t) not in roles and id(t) not in shared:
                raise LanesDiffer("its graph has a tensor that belongs to no lane")
        return [roles.get(id(t), (COMMON, ("", ""))) for t in tensors]
