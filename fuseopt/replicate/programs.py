"""The programs of a led step: each does the step of some lanes of each model.

A call whose lanes are among those of a program runs that program, and the others are
left out: nothing is extended, scheduled or built. In the place of a gradient that is
missing the program gets a stand-in, which nothing reads.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch

from ..config import Config
from ..ir.expressions import Item
from ..ir.graph import Extern
from ..runtime.plan import Plan
from ..runtime.step import CompiledStep
from ..runtime.tables.host_numbers import CPU
from ..shadow.keys import GRAD, Role
from ..shadow.lanes import Lanes
from .extend import COMMON, Extended
from .models import Models, reach_of
from .results import OwnFloat, OwnInt, Results
from .source import LaneTensors

#: The tensor of a lane, or the index of one that belongs to none.
Where = tuple[int, Role] | int
Members = Sequence[Sequence[int]]
Like = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
#: Sets of lanes for which a program keeps what it is told of them.
TURNS = 8


class Turn(NamedTuple):
    """What a program is told of a set of lanes. `order`, `stand_ins`, `gradients`: see
    LaneTensors. `taking`: see Binding. `at`: by model, the numbers that its lanes have
    in the program. `asked`: (lane, key of its state) of integers behind the arguments.
    """

    order: list[int]
    stand_ins: list[torch.Tensor]
    gradients: list[int | None]
    taking: list[bool] | None
    at: list[list[int]]
    asked: list[tuple[int, str]]


@dataclass(eq=False)
class Program:
    """A step of the lanes `members` of each model, of groups with these `lists`.

    `places`: where the tensors of a call come from. `counted`: (model, number of its
    lane, key of its state) of integers. `like`: by lane, size, strides and dtype of its
    gradient. `some`: may lanes be left out?
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
    turns: dict[str, Turn] = field(default_factory=dict)
    _stand_ins: dict[int, torch.Tensor] = field(default_factory=dict)
    _memory: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def of(self, model: int) -> Sequence[int]:
        """Its lanes of a model, which may be younger than this."""
        return self.members[model] if model < len(self.members) else ()

    def has(self, members: Members) -> bool:
        """Are these its lanes, or some of them that may do without the others?"""
        used = {x for x in self.results.extended.owners if x != COMMON}
        mine = [self.of(k) for k in used]
        asked = [members[k] for k in used]
        if self.some:
            return all(set(x) <= {*y} for x, y in zip(asked, mine, strict=True))
        return all([*x] == [*y] for x, y in zip(asked, mine, strict=True))

    def turn_to(self, lanes: Lanes, members: Members) -> bool:
        """Do the step of these lanes from now on. False if one that is left out has
        lost its state.
        """
        key = repr((members, [kind.lanes for kind in lanes.kinds]))
        turn = self.turns.pop(key, None) or self._turned(lanes, members)
        if turn is None:
            return False
        while len(self.turns) >= TURNS:
            del self.turns[next(iter(self.turns))]
        self.turns[key] = self.turn = turn
        self.step.taking, self.results.at = turn.taking, turn.at
        self.source.turn_to(turn.order, turn.stand_ins, turn.gradients)
        return True

    def _turned(self, lanes: Lanes, members: Members) -> Turn | None:
        first, known = self.source.n, lanes.places()
        index = {place: first + k for k, place in enumerate(known)}
        order = [
            where if isinstance(where, int) else index.get(where, -1)
            for where in self.places
        ]
        # the tensors that there are not, behind all others
        missing = [k for k, i in enumerate(order) if i < 0]
        for k, i in enumerate(missing, first + len(known)):
            order[i] = k
        gone: list[Any] = [self.places[i] for i in missing]
        if any(role != GRAD for _, (role, _) in gone):
            return None
        gradients: list[int | None] = []
        if not missing:
            of_place = {x: i for i, x in enumerate(self.places)}
            gradients = [of_place.get(x) for x in sorted(known) if x[1][0] == GRAD]
        present = [*map(set, members[: len(self.members)])]
        pairs = [*zip(self.members, present, strict=True)]
        taking = [i in there for some, there in pairs for i in some]
        asked = []
        for model, k, key in self.counted:
            lane = self.members[model][k]
            # of one that is left out: the number of another, which no lane uses
            if lane not in present[model] and members[model]:
                lane = members[model][0]
            asked.append((lane, key))
        return Turn(
            order,
            [self._stand_in(lane) for lane, _ in gone],
            gradients,
            None if all(taking) else [*taking, True],
            [[k for k, i in enumerate(some) if i in there] for some, there in pairs],
            asked,
        )

    def _stand_in(self, lane: int) -> torch.Tensor:
        """A tensor like the gradient of a lane. All have one memory, unless the step
        writes gradients.
        """
        made = self._stand_ins.get(lane)
        if made is None:
            size, stride, dtype = self.like[lane]
            reach = reach_of(size, stride)
            if self._writes_gradients:
                made = torch.empty_strided(size, stride, dtype=dtype)
            else:
                memory = self._memory.get(dtype)
                if memory is None or memory.numel() < reach:
                    memory = self._memory[dtype] = torch.empty(reach, dtype=dtype)
                made = memory.as_strided(size, stride)
            self._stand_ins[lane] = made
        return made

    @functools.cached_property
    def _writes_gradients(self) -> bool:
        mutated = (self.places[i] for i in self.step.program.plan.inputs.mutated)
        return any(not isinstance(x, int) and x[1][0] == GRAD for x in mutated)

    def number(
        self, stand_in: OwnInt | OwnFloat, m: int, numbers: Sequence[Any]
    ) -> Any:
        """A number of the last call, of lane m of a model."""
        results = self.results
        model = results.extended.number_owners[stand_in.index]
        return results.number(stand_in, results.at[model][m], numbers)


def may_leave_out(
    plan: Plan, extended: Extended, results: Results, config: Config
) -> bool:
    """Can lanes be left out of a plan of all lanes? It must be kernels of the CPU
    alone, which read no number of a lane's tensor.
    """
    graph = plan.captured.graph
    kernels = not any(isinstance(step, Extern) for step in plan.schedule.steps)
    on_cpu = all(b.device == CPU for b in graph.buffers)
    items = any(
        isinstance(x, Item) and owner != COMMON
        for x, owner in zip(results.numbers, extended.number_owners, strict=True)
    )
    cpp = config.target in ("auto", "cpp")
    return kernels and on_cpu and cpp and not items


def _layout(t: torch.Tensor) -> Like:
    return tuple(t.shape), t.stride(), t.dtype


def _but_for_the_gradient(one: Any, other: Any) -> bool:
    return bool((*one[:2], *one[3:]) == (*other[:2], *other[3:]))


class Programs:
    """The programs that are kept, the latest last."""

    def __init__(self) -> None:
        self.every: list[Program] = []

    def __iter__(self) -> Iterator[Program]:
        return iter(self.every)

    def clear(self) -> None:
        """Drop all of them."""
        self.every.clear()

    def find(self, lanes: Lanes, members: Members) -> Program | None:
        """One that does the step of these lanes now, if need be without others."""
        fit = [x for x in reversed(self._of(lanes)) if x.has(members)]
        fit.sort(key=lambda x: sum(map(len, x.members)))
        for program in fit:
            if program.turn_to(lanes, members):
                self.every.remove(program)
                self.every.append(program)
                return program
        return None

    def _of(self, lanes: Lanes) -> list[Program]:
        """The programs in which each lane has the number that it has among these."""
        lists = lanes.lists_of()
        return [x for x in self.every if x.lists == lists]

    def wider(self, lanes: Lanes, models: Models, members: Members) -> list[list[int]]:
        """The lanes of each model, and those that a gradient would make its own."""
        wide, others = [[*x] for x in members], self._of(lanes)
        for key, model in models.of.items():
            p = models.params[model]
            if p.grad is None or not members[model]:
                continue
            had = {i for program in others for i in program.of(model)}
            plain = _layout(p.grad) == _layout(p)
            for kind in lanes.kinds:
                if not kind.has_grad and _but_for_the_gradient(kind.key, key):
                    more = kind.lanes if plain else had.intersection(kind.lanes)
                    wide[model] = sorted({*wide[model], *more})
        return wide

    def like(self, lanes: Lanes, members: Members) -> dict[int, Like]:
        """Of each lane size, strides and dtype of its gradient: the one that it has or
        had, or may get.
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

    def add(self, program: Program, most: int) -> None:
        """Keep a program, and `most` in all."""
        self.every = [*self.every, program][-most:]


__all__ = ["Program", "Programs", "Where", "may_leave_out"]
