"""Programs of a led step: each does the step of some lanes of each model.

A call whose lanes are a subset of a program's lanes runs that program, which leaves out
the rest. Such a call extends, schedules and builds nothing. For a missing gradient the
program gets a stand-in, which nothing reads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, NamedTuple

import torch

from ..config import Config
from ..inputs.keys import GRAD, Role
from ..inputs.lane_matcher import counter_places, order_of, places
from ..inputs.lanes import Lanes
from ..inputs.presence import alike_but_for_the_gradient, widened
from ..ir.expressions import Item
from ..runtime.plan import Plan
from ..runtime.recent import Recent
from ..runtime.step import CompiledStep
from ..runtime.tables.host_numbers import CPU
from .extend import COMMON, Extended
from .models import Models, reach_of
from .results import Results
from .source import LaneTensors

#: The tensor of a lane, or the index of a tensor of no lane.
Where = tuple[int, Role] | int
Members = Sequence[Sequence[int]]
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
#: The number of sets of lanes for which a program keeps a Turn.
TURNS = 8


class Turn(NamedTuple):
    """The inputs of a program for one set of lanes.

    `order`, `stand_ins`, `gradients`: see LaneTensors. `taking`: see Binding. `at`: by
    model, the numbers of its lanes in the program. `counters`: the integers after the
    arguments, by their places in `Found.counters`.
    """

    order: list[int]
    stand_ins: list[torch.Tensor]
    gradients: list[int | None]
    taking: bytes | None
    at: list[list[int]]
    counters: list[int]


@dataclass(eq=False)
class Program:
    """A step of the lanes `members` of each model, of groups with these `lists`.

    `places`: the origins of a call's tensors. `counted`: (model, number of its lane,
    key of its state) of integers. `like`: by lane, size, strides and dtype of its
    gradient. `some`: True if a call may leave out lanes.
    """

    step: CompiledStep
    source: LaneTensors
    results: Results
    lists: list[list[int]]
    members: Members
    places: list[Where]
    counted: list[tuple[int, int, str]]
    like: dict[int, Like]
    some: bool
    turn: Turn = field(init=False)
    #: the home of the lanes of its calls, see presence
    home: Lanes | None = None
    turns: Recent[Turn] = field(default_factory=lambda: Recent(TURNS))
    _stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)
    _memory: dict[tuple[torch.dtype, torch.device], torch.Tensor] = field(
        default_factory=dict
    )

    def of(self, model: int) -> Sequence[int]:
        """Return its lanes of a model, which may be newer than the program."""
        return self.members[model] if model < len(self.members) else ()

    def has(self, members: Members) -> bool:
        """Are these its lanes, or a subset that can leave out the rest?"""
        mine = [self.of(k) for k in self._models]
        theirs = [members[k] for k in self._models]
        if self.some:
            return all(set(x) <= {*y} for x, y in zip(theirs, mine, strict=True))
        return all([*x] == [*y] for x, y in zip(theirs, mine, strict=True))

    def turn_to(self, lanes: Lanes, members: Members) -> bool:
        """Do the step of these lanes from now on.

        Returns False if a lane that is left out has lost its state.
        """
        if lanes.home is not None and self.lives_in(lanes.home):
            self.take_part(lanes)
            return True
        found = lanes if lanes.home is None else lanes.home
        key = repr((members, [kind.lanes for kind in found.kinds], lanes.present))
        turn = self.turns.get(key) or self._make_turn(lanes, found, members)
        if turn is None:
            return False
        self.home, self.turn = None, self.turns.use(key, turn)
        self.step.taking, self.results.at = turn.taking, turn.at
        self.source.turn_to(turn.order, turn.stand_ins, turn.gradients)
        return True

    def lives_in(self, home: Lanes) -> bool:
        """Are the lanes of a home that may have a gradient exactly this program's?"""
        if self.home is home:
            return True
        of_home = {kind.model: kind.lanes for kind in home.kinds if kind.has_grad}
        return self.some and all(
            [*self.of(k)] == of_home.get(k, []) for k in self._models
        )

    def take_part(self, lanes: Lanes) -> None:
        """Do the step of the lanes of its home that have a gradient."""
        home = lanes.home
        assert home is not None
        if self.home is not home:
            self.home = None  # in case this is interrupted
            self._live_in(home)
            self.home = home
        present = lanes.present
        taking = bytes(map(present.__getitem__, self._at_home))
        every = all(taking)
        self.step.taking = None if every else taking + b"\1"
        at, first = [], 0
        for some in self.members:
            at.append([*compress(range(len(some)), taking[first : first + len(some)])])
            first += len(some)
        self.results.at = at
        # a lane that is left out gets the number of another lane, unused
        there = {name: x for x, i, name in self._counters if present[i]}
        numbers = [
            x if present[i] else there.get(name, x) for x, i, name in self._counters
        ]
        self.turn = self.turn._replace(taking=self.step.taking, at=at, counters=numbers)

    def _live_in(self, home: Lanes) -> None:
        """Find the tensors of lanes by their home from now on."""
        known = places(home)
        index = {place: self.source.n + k for k, place in enumerate(known)}
        order = [x if isinstance(x, int) else index[x] for x in self.places]
        at = {lane: k for k, lane in enumerate(order_of(home))}
        self._at_home = [at[lane] for some in self.members for lane in some]
        counters = {place: k for k, place in enumerate(counter_places(home))}
        # for each integer after the arguments: its place among the found counters, its
        # lane's place in the home, and (model, key)
        self._counters = [
            (counters[lane, key], at[lane], (m, key))
            for m, k, key in self.counted
            for lane in (self.members[m][k],)
        ]
        of_place = {x: i for i, x in enumerate(self.places)}
        gradients = [of_place.get(x) for x in sorted(known) if x[1][0] == GRAD]
        self.turn = Turn(order, [], gradients, None, [], [])
        self.source.turn_to(order, (), gradients, self._instead)

    def _instead(self) -> list[torch.Tensor | None]:
        """Return the stand-ins; see LaneTensors."""
        return [
            self._stand_in(x[0]) if not isinstance(x, int) and x[1][0] == GRAD else None
            for x in self.places
        ]

    def _make_turn(self, lanes: Lanes, found: Lanes, members: Members) -> Turn | None:
        """Return a Turn, or None if a lane lacks state; `found`: lanes that include
        these.
        """
        first, known = self.source.n, places(found)
        lacking = set()
        if found is not lanes:
            missing_lanes = map(operator.not_, lanes.present)
            lacking = {*compress(order_of(found), missing_lanes)}
        index = {
            place: first + k
            for k, place in enumerate(known)
            if place[1][0] != GRAD or place[0] not in lacking
        }
        order = [
            where if isinstance(where, int) else index.get(where, -1)
            for where in self.places
        ]
        # the missing tensors come after all others
        missing = [k for k, i in enumerate(order) if i < 0]
        for k, i in enumerate(missing, first + len(known)):
            order[i] = k
        gone: list[Any] = [self.places[i] for i in missing]
        if any(role != GRAD for _, (role, _) in gone):
            return None
        gradients: list[int | None] = []
        if not missing:
            of_place = {x: i for i, x in enumerate(self.places)}
            gradients = [of_place.get(x) for x in sorted(index) if x[1][0] == GRAD]
        present = [*map(set, members[: len(self.members)])]
        pairs = [*zip(self.members, present, strict=True)]
        taking = [i in there for some, there in pairs for i in some]
        numbers = []
        counters = {place: k for k, place in enumerate(counter_places(found))}
        for model, k, key in self.counted:
            lane = self.members[model][k]
            # a lane that is left out gets the number of another lane, unused
            if lane not in present[model] and members[model]:
                lane = members[model][0]
            numbers.append(counters.get((lane, key), -1))
        if -1 in numbers:
            return None
        return Turn(
            order,
            [self._stand_in(lane) for lane, _ in gone],
            gradients,
            None if all(taking) else bytes([*taking, True]),
            [[k for k, i in enumerate(some) if i in there] for some, there in pairs],
            numbers,
        )

    def _stand_in(self, lane: int) -> torch.Tensor:
        """Return a tensor like the gradient of a lane.

        All have one memory, unless the step writes gradients.
        """
        made = self._stand_ins.get(lane)
        if made is None:
            size, stride, dtype, device = self.like[lane]
            reach, at = reach_of(size, stride), (dtype, device)
            if self._writes_gradients:
                made = torch.empty_strided(size, stride, dtype=dtype, device=device)
            else:
                memory = self._memory.get(at)
                if memory is None or memory.numel() < reach:
                    memory = torch.empty(reach, dtype=dtype, device=device)
                    self._memory[at] = memory
                made = memory.as_strided(size, stride)
            self._stand_ins[lane] = made
        return made

    @functools.cached_property
    def _models(self) -> frozenset[int]:
        return _models_of(self.results.extended)

    @functools.cached_property
    def _writes_gradients(self) -> bool:
        mutated = (self.places[i] for i in self.step.program.plan.inputs.mutated)
        return any(not isinstance(x, int) and x[1][0] == GRAD for x in mutated)


def _models_of(extended: Extended) -> frozenset[int]:
    """Return the models whose tensors a step has."""
    return frozenset(extended.owners) - {COMMON}


def may_leave_out(
    plan: Plan, extended: Extended, results: Results, config: Config, models: Models
) -> bool:
    """Can a call leave lanes out of a plan of all lanes?

    The plan must have kernels alone. They must read no number of a lane's tensor and do
    nothing for a lane without a gradient. None of their rows may belong to two lanes,
    and on a device they must reduce nothing.
    """
    used = _models_of(extended)
    if any(models.params[k].grad is None for k in used):
        return False
    graph = plan.captured.graph
    kernels = not plan.schedule.externs
    reduced = any(v.reduction for k in plan.schedule.kernels for v in k.every)
    on_cpu = all(b.device == CPU for b in graph.buffers) and config.target != "triton"
    items = any(
        isinstance(x, Item) and owner != COMMON
        for x, owner in zip(results.numbers, extended.number_owners, strict=True)
    )
    return kernels and not items and (on_cpu or not reduced) and _unmixed(plan)


def _unmixed(plan: Plan) -> bool:
    """Does each row of the kernels' tables belong to at most one owner?"""
    owner = plan.captured.owners.get
    return all(
        len({owner(b) for b in row} - {None}) < 2
        for kernel in plan.schedule.kernels
        for v in kernel.every
        for row in zip(*v.columns, strict=True)
    )


def _layout(t: torch.Tensor) -> Like:
    return tuple(t.shape), t.stride(), t.dtype, t.device


class Programs:
    """The programs that fuseopt keeps, the latest last."""

    def __init__(self) -> None:
        self.every: list[Program] = []

    def __iter__(self) -> Iterator[Program]:
        return iter(self.every)

    def clear(self) -> None:
        """Drop all programs."""
        self.every.clear()

    def find(self, lanes: Lanes, members: Members) -> Program | None:
        """Return a program for the step of these lanes; it may leave out others."""
        fit = [x for x in reversed(self._of(lanes)) if x.has(members)]
        fit.sort(key=lambda x: sum(map(len, x.members)))
        for program in fit:
            if program.turn_to(lanes, members):
                self.every.remove(program)
                self.every.append(program)
                return program
        return None

    def at(self, home: Lanes | None) -> Program | None:
        """Return the program that has this home, or None."""
        if home is None:
            return None
        return next((x for x in self.every if x.home is home), None)

    def _of(self, lanes: Lanes) -> list[Program]:
        """Return the programs with the same lane numbers as these lanes."""
        lists = lanes.lists_of()
        return [x for x in self.every if x.lists == lists]

    def wider(self, lanes: Lanes, models: Models, members: Members) -> list[list[int]]:
        """Return the lanes of each model, and those that a gradient would add to it."""
        wide, others = [[*x] for x in members], self._of(lanes)
        for key, model in models.of.items():
            p = models.params[model]
            if p.grad is None or not members[model]:
                continue
            had = {i for program in others for i in program.of(model)}
            plain = _layout(p.grad) == _layout(p)
            for kind in lanes.kinds:
                if not kind.has_grad and alike_but_for_the_gradient(kind.key, key):
                    more = kind.lanes if plain else had.intersection(kind.lanes)
                    wide[model] = sorted({*wide[model], *more})
        return wide

    def like(self, lanes: Lanes, members: Members) -> dict[int, Like]:
        """Return size, strides and dtype of the gradient of each lane.

        It is the gradient that the lane has, had, or may get.
        """
        found: dict[int, Like] = {}
        for program in self._of(lanes):
            found.update(program.like)
        for i in chain.from_iterable(members):
            p = lanes.params[i]
            had = i in found and found[i][0] == tuple(p.shape)
            if p.grad is not None or not had:
                found[i] = _layout(p if p.grad is None else p.grad)
        return found

    def home_of(self, program: Program, lanes: Lanes, models: Models) -> Lanes | None:
        """Return the home of lanes for a program that does their step.

        None if the program cannot have a home.
        """
        if not program.some or any(kind.numbers for kind in lanes.kinds):
            return None
        wide = {
            key: program.of(model)
            for key, model in models.of.items()
            if models.params[model].grad is not None
        }
        return widened(lanes, wide)

    def add(self, program: Program, most: int) -> None:
        """Add a program, and keep the last `most` programs."""
        self.every = [*self.every, program][-most:]


__all__ = ["Program", "Programs", "Where", "may_leave_out"]
