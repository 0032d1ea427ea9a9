"""Write the state that a step left in the shadow of the models to all lanes.

The writes are C calls, which run when the step is launched. A model's counter is a
stand-in for the counters of its lanes. Each lane gets its own number, under whatever
key the step stores the stand-in. No other object becomes a lane's number.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any, Protocol

import torch

from ..inputs.keys import GRAD, NUMBERS, PARAM, LanesDiffer
from ..inputs.lanes import Kind, Lanes
from ..shadow.optimizer import Shadow, Write
from .models import Models
from .results import OwnFloat, OwnInt

State = dict[str, Any]


class Entries(functools.partial):  # type: ignore[type-arg]
    """A C call that sets one entry of each of some states: `column` has the values."""

    def __new__(cls, states: Sequence[Any], key: Any, column: Sequence[Any]) -> Entries:
        """Make a partial."""
        each = map(dict.__setitem__, states, repeat(key), column)
        call = super().__new__(cls, collections.deque, each, 0)
        call.states, call.key, call.column = states, key, column
        return call

    states: Sequence[Any]
    key: Any
    column: Sequence[Any]


class LaneNumbers(Protocol):
    """A LedStep, which has the numbers of single lanes."""

    def own_numbers(self, own: OwnInt | OwnFloat) -> list[Any]:
        """Return a number for each lane of a model."""


class Writes:
    """Writes to `lanes`, from the `shadow` of their `models` after an unlaunched step.

    `fresh`: new states of lanes without state, by parameter; this adds to it. `made`:
    the tensors that the step created, by the id of their token in the state of models,
    and by lane. `gives`: the step, None if it had no graph.
    """

    def __init__(
        self,
        lanes: Lanes,
        models: Models,
        shadow: Shadow,
        fresh: dict[torch.Tensor, State],
        made: Mapping[int, Mapping[int, torch.Tensor]],
        gives: LaneNumbers | None,
    ) -> None:
        self.lanes = lanes
        self.models = models
        self.shadow = shadow
        self.fresh = fresh
        self.made = made
        self.gives = gives
        #: tensors of lanes, and those to copy to them after the launch
        self._copied: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def to(self, state: dict[torch.Tensor, State]) -> list[Write]:
        """Return the writes to an optimizer with this `state`.

        Raises LanesDiffer if the step changed more of the models than their state.
        """
        lanes, shadow, fresh = self.lanes, self.shadow, self.fresh
        if not shadow.is_intact():
            raise LanesDiffer("the step replaces the optimizer's state or parameters")
        if self.gives is None and self.models.counted:
            # the step computed numbers from the models' counters outside of a graph
            raise LanesDiffer("fuseopt compiled no part of the step")
        writes = [*shadow.writes(lanes=False, check=self._check_common)]
        for kind in lanes.kinds:
            writes += self._of_kind(kind)
        if self._copied[0]:
            writes.insert(0, functools.partial(torch._foreach_copy_, *self._copied))
        if fresh:
            # in the order of a whole step
            ordered = {p: fresh[p] for p in lanes.params if p in fresh}
            writes.append(functools.partial(dict.update, state, ordered))
        return writes

    def _of_kind(self, kind: Kind) -> list[Write]:
        lanes = self.lanes
        p = self.models.params[kind.model]
        now, old = self.shadow.stand_in.state.get(p), self.models.state.get(p, {})
        if now is None:
            if kind.has_state:
                raise LanesDiffer("the step drops the state of a parameter")
            return []
        hollow = self.models.packed(kind.model)[1].items()
        if any(now.get(k) is not t for k, t in hollow if k in old):
            raise LanesDiffer(
                "the step replaces a tensor of its state that is kept packed"
            )
        if kind.has_state and tuple(now) == tuple(old):
            changed = [k for k, v in now.items() if v is not old[k]]
            if not changed:
                return []
            numbers = not any(isinstance(now[k], torch.Tensor) for k in changed)
            fresh_ones = self.fresh and any(
                lanes.params[i] in self.fresh for i in kind.lanes
            )
            if numbers and not fresh_ones:
                states: list[Any] = [*map(lanes.states.__getitem__, kind.lanes)]
                columns = [self._column(kind, now[k], states) for k in changed]
                return [*map(Entries, repeat(states), changed, columns)]
        writes: list[Write] = []
        for i, content in self._given_to(kind, now, old).items():
            state = lanes.states[i]
            if state is None:
                self.fresh[lanes.params[i]] = content
                continue
            fresh = self.fresh.get(lanes.params[i])
            if fresh is not None:
                # the optimizer lacks it until the last write
                fresh.clear()
                fresh.update(content)
                continue
            if tuple(content)[: len(state)] != tuple(state):
                writes.append(functools.partial(state.clear))
            writes.append(functools.partial(dict.update, state, content))
        return writes

    def _differs(self, value: Any) -> bool:
        """May a number of a model differ between its lanes?"""
        return isinstance(value, (OwnInt, OwnFloat)) or (
            id(value) in self.models.stand_ins
        )

    def _column(self, kind: Kind, value: Any, states: Sequence[State]) -> Sequence[Any]:
        """Return each lane's value for a value in the state of its kind's model.

        `states`: the lanes' states before the step.
        """
        if isinstance(value, (OwnInt, OwnFloat)):
            assert self.gives is not None
            return self.gives.own_numbers(value)
        place = self.models.stand_ins.get(id(value))
        if place is None:
            return [self._check_number(value)] * len(states)
        model, key = place
        if model != kind.model:
            raise LanesDiffer("it keeps a number of one lane in the state of another")
        return [*map(itemgetter(key), states)]

    def _check_number(self, value: Any) -> Any:
        """Return a value for all lanes' state; raise LanesDiffer for an unsupported
        one.
        """
        if type(value) not in NUMBERS:
            raise LanesDiffer(f"the step makes state that is a {type(value).__name__}")
        if isinstance(value, float) and self.shadow.stands_for_numpy(value):
            raise LanesDiffer("it keeps a numpy.float64 in the state of its lanes")
        if isinstance(value, float) and value != value:
            raise LanesDiffer("it keeps a number computed from a tensor of a lane")
        return value

    def _check_common(self, values: Iterable[Any]) -> None:
        """Raise LanesDiffer if a value outside of lanes' state belongs to a lane."""
        for value in values:
            if self._differs(value):
                raise LanesDiffer(
                    "it keeps a number of one lane in a place that all lanes share"
                )
            if isinstance(value, dict):
                self._check_common((*value, *value.values()))
            elif isinstance(value, (list, tuple)):
                self._check_common(value)

    def _given_to(
        self, kind: Kind, now: Mapping[str, Any], old: Mapping[str, Any]
    ) -> dict[int, State]:
        """Return the state of each lane after the step.

        `now`, `old`: the state of their model after and before it.
        """
        lanes = self.lanes
        p = self.models.params[kind.model]
        places: dict[int, Any] = {id(p): (PARAM, "")}
        if p.grad is not None:
            places[id(p.grad)] = GRAD, ""
        places.update(
            (id(v), ("state", k)) for k, v in old.items() if isinstance(v, torch.Tensor)
        )
        _check_apart(
            v
            for v in now.values()
            if isinstance(v, torch.Tensor)
            and id(v) not in self.made
            and id(v) not in places
        )
        contents = {}
        befores = [lanes.states[i] or {} for i in kind.lanes]
        columns = {
            key: self._column(kind, value, befores)
            for key, value in now.items()
            if not isinstance(value, torch.Tensor)
            and not (key in old and value is old[key])
        }
        for m, (i, before) in enumerate(zip(kind.lanes, befores, strict=True)):
            q = lanes.params[i]
            content: State = {}
            for key, value in now.items():
                place = places.get(id(value))
                if key in columns:
                    content[key] = columns[key][m]
                elif not isinstance(value, torch.Tensor):
                    content[key] = before[key]
                elif id(value) in self.made:
                    content[key] = self.made[id(value)][i]
                elif place is None:
                    # a tensor that depends on no lane: each lane gets a copy, filled
                    # after the launch
                    content[key] = torch.empty_like(value)
                    self._copied[0].append(content[key])
                    self._copied[1].append(value)
                elif place[0] == "state":
                    content[key] = before[place[1]]
                else:
                    content[key] = q if place[0] == PARAM else q.grad
            contents[i] = content
        return contents


def _check_apart(tensors: Iterable[torch.Tensor]) -> None:
    """Raise LanesDiffer unless each of these tensors may be replaced by a copy.

    A tensor that shares memory with another one, or has an element twice, is a view.
    """
    storages = set()
    for t in tensors:
        if not t.numel():
            continue
        storage = t.untyped_storage().data_ptr()
        if storage in storages or torch.empty_like(t).stride() != t.stride():
            raise LanesDiffer("tensors of its new state share memory")
        storages.add(storage)
