"""Write the state that a step left in the shadow of the models to all lanes.

The writes are C calls, which run when the step is launched. A number that a model
counts stands for those of its lanes: each lane is given its own, under whatever key the
step stores it, and nothing else is given one.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..inputs.keys import GRAD, NUMBERS, PARAM, LanesDiffer
from ..inputs.lanes import Kind, Lanes
from ..shadow.optimizer import Shadow, Write
from .models import Models
from .results import OwnFloat, OwnInt

State = dict[str, Any]


class Each(functools.partial):  # type: ignore[type-arg]
    """A C call that updates each of some states with its new entries."""

    def __new__(cls, states: Sequence[Any], news: Sequence[State]) -> Each:
        """As partials are made."""
        each = map(dict.update, states, news)
        call = super().__new__(cls, collections.deque, each, 0)
        call.states, call.news = states, news
        return call

    states: Sequence[Any]
    news: Sequence[State]


class Gives(Protocol):
    """Has the numbers of single lanes: a LedStep."""

    def own_numbers(self, own: OwnInt | OwnFloat) -> list[Any]:
        """A number for each lane of a model."""


class Writes:
    """`lanes`, and the `shadow` of their `models` after a step that was not launched.

    `fresh`: new states of lanes that had none, by parameter; it is added to. `made`:
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
        gives: Gives | None,
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
        """The writes to an optimizer with this `state`. Raises LanesDiffer where the
        step changed more of the models than their state.
        """
        lanes, shadow, fresh = self.lanes, self.shadow, self.fresh
        if not shadow.is_intact():
            raise LanesDiffer("the step replaces the optimizer's state or parameters")
        if self.gives is None and self.models.counted:
            # numbers made of what the models count, of which no graph knows
            raise LanesDiffer("fuseopt compiled no part of the step")
        writes = [*shadow.writes(lanes=False, check=self._check_common)]
        for kind in lanes.kinds:
            writes += self._of_kind(kind)
        if self._copied[0]:
            writes.insert(0, functools.partial(torch._foreach_copy_, *self._copied))
        if fresh:
            # in the order in which a whole step makes it
            ordered = {p: fresh[p] for p in lanes.params if p in fresh}
            writes.append(functools.partial(dict.update, state, ordered))
        return writes

    def _of_kind(self, kind: Kind) -> list[Write]:
        lanes = self.lanes
        p = self.models.params[kind.model]
        now, old = self.shadow.itself.state.get(p), self.models.state.get(p, {})
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
            if numbers and not any(lanes.params[i] in self.fresh for i in kind.lanes):
                states: list[Any] = [lanes.states[i] for i in kind.lanes]
                news = self._numbers(kind, {k: now[k] for k in changed}, states)
                return [Each(states, news)]
        writes: list[Write] = []
        for i, content in self._given_to(kind, now, old).items():
            state = lanes.states[i]
            if state is None:
                self.fresh[lanes.params[i]] = content
                continue
            fresh = self.fresh.get(lanes.params[i])
            if fresh is not None:
                # not yet in the optimizer: the last write adds it
                fresh.clear()
                fresh.update(content)
                continue
            if tuple(content)[: len(state)] != tuple(state):
                writes.append(functools.partial(state.clear))
            writes.append(functools.partial(dict.update, state, content))
        return writes

    def _numbers(self, kind: Kind, news: State, states: Sequence[State]) -> list[State]:
        """New numbers in the state, for each lane of a kind; `states`: before."""
        if not any(map(self._differs, news.values())):
            for value in news.values():
                self._check_number(value)
            return [news] * len(states)
        columns = [self._column(kind, value, states) for value in news.values()]
        return [dict(zip(news, row, strict=True)) for row in zip(*columns, strict=True)]

    def _differs(self, value: Any) -> bool:
        """May a number of a model be another one in each of its lanes?"""
        return isinstance(value, (OwnInt, OwnFloat)) or (
            id(value) in self.models.stand_ins
        )

    def _column(self, kind: Kind, value: Any, states: Sequence[State]) -> Sequence[Any]:
        """What each lane of a kind has for a value in the state of its model; `states`:
        the lanes' states before the step.
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
        return [before[key] for before in states]

    def _check_number(self, value: Any) -> Any:
        """A value of all lanes' state, which is returned; raises LanesDiffer for
        another.
        """
        if type(value) not in NUMBERS:
            raise LanesDiffer(f"the step makes state that is a {type(value).__name__}")
        if isinstance(value, float) and self.shadow.stands_for_numpy(value):
            raise LanesDiffer("it keeps a numpy.float64 in the state of its lanes")
        if isinstance(value, float) and value != value:
            raise LanesDiffer("it keeps a number computed from a tensor of a lane")
        return value

    def _check_common(self, values: Iterable[Any]) -> None:
        """Raise LanesDiffer where a value outside of lanes' state is one of a lane."""
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
        """The state of each lane after the step; `now`: their model's, `old`: their
        model's before.
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
                    # a tensor that depends on no lane: a copy for each, whose contents
                    # are copied after the launch
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
    """Raise LanesDiffer unless a copy of each of these tensors is all that a lane
    needs: one that shares memory with another of them, or has an element twice, is a
    view.
    """
    storages = set()
    for t in tensors:
        if not t.numel():
            continue
        storage = t.untyped_storage().data_ptr()
        if storage in storages or torch.empty_like(t).stride() != t.stride():
            raise LanesDiffer("tensors of its new state share memory")
        storages.add(storage)
