"""What a step left in the shadow of the leading lanes -> what all lanes are given.

All of it is calls of C, which run when the step is launched.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import torch

from ..shadow.lanes import GRAD, PARAM, Kind, Lanes, Unlike
from ..shadow.optimizer import Shadow, Write

State = dict[str, Any]


class Each(functools.partial):  # type: ignore[type-arg]
    """A call of C that gives all `states` the same."""

    def __new__(cls, states: Sequence[Any], news: State) -> Each:
        """As partials are made."""
        each = map(dict.update, states, repeat(news))
        made = super().__new__(cls, collections.deque, each, 0)
        made.states, made.news = states, news
        return made

    states: Sequence[Any]
    news: State


class Writes:
    """`lanes` and the `shadow` of their leads, after a step that was not launched yet.

    `leads`: the state of the leading lanes when it began. `fresh`: what lanes that had
    no state have been given, which gets more. `made`: what the step made for led lanes,
    by what it made for the leading ones.
    """

    def __init__(
        self,
        lanes: Lanes,
        shadow: Shadow,
        leads: Mapping[torch.Tensor, State],
        fresh: dict[torch.Tensor, State],
        made: Mapping[int, Sequence[torch.Tensor]],
    ) -> None:
        self.lanes = lanes
        self.shadow = shadow
        self.leads = leads
        self.fresh = fresh
        self.made = made
        #: tensors of led lanes, and what they are to hold when the step is launched
        self._copied: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

    def to(self, state: dict[torch.Tensor, State]) -> list[Write]:
        """What gives all lanes of an optimizer with this state what the step gave the
        leading ones. Raises Unlike where that is more than state.
        """
        lanes, shadow, fresh = self.lanes, self.shadow, self.fresh
        if not shadow.is_intact():
            raise Unlike("the step replaces the optimizer's state or parameters")
        writes = [*shadow.writes(roots=False)]
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
        p = lanes.params[kind.lead]
        now, old = self.shadow.itself.state.get(p), lanes.states[kind.lead] or {}
        if now is None:
            if kind.has_state:
                raise Unlike("the step drops the state of a parameter")
            return []
        # else the lead's own is among what the shadow writes
        lead = [kind.lead] if p not in self.leads else []
        if kind.has_state and tuple(now) == tuple(old):
            changed = [k for k, v in now.items() if v is not old[k]]
            if not changed:
                return []
            if all(k in kind.numbers for k in changed):
                news = {k: now[k] for k in changed}
                states = [lanes.states[i] for i in (*lead, *kind.others)]
                return [Each(states, news)]
        contents = {i: dict(now) for i in lead}
        contents |= self._given_to(kind, now, old)
        writes: list[Write] = []
        for i, content in contents.items():
            state = lanes.states[i]
            if state is None:
                self.fresh[lanes.params[i]] = content
                continue
            if tuple(content)[: len(state)] != tuple(state):
                writes.append(functools.partial(state.clear))
            writes.append(functools.partial(dict.update, state, content))
        return writes

    def _given_to(
        self, kind: Kind, now: Mapping[str, Any], old: Mapping[str, Any]
    ) -> dict[int, State]:
        """By lane, the state that led lanes have after the step; `now`: their lead's,
        `old`: what it was.
        """
        lanes = self.lanes
        p = lanes.params[kind.lead]
        places: dict[int, Any] = {id(p): (PARAM, "")}
        if p.grad is not None:
            places[id(p.grad)] = GRAD, ""
        places.update(
            (id(v), ("state", k)) for k, v in old.items() if isinstance(v, torch.Tensor)
        )
        found = {}
        for m, i in enumerate(kind.others):
            q = lanes.params[i]
            given: State = {}
            for key, value in now.items():
                place = places.get(id(value))
                if not isinstance(value, torch.Tensor):
                    given[key] = value
                elif id(value) in self.made:
                    given[key] = self.made[id(value)][m]
                elif place is None:
                    # made of nothing that lanes have: for all the same, and filled
                    # by the launch, which is still to come
                    given[key] = torch.empty_like(value)
                    self._copied[0].append(given[key])
                    self._copied[1].append(value)
                elif place[0] == "state":
                    given[key] = lanes.states[i][place[1]]  # type: ignore[index]
                else:
                    given[key] = q if place[0] == PARAM else q.grad
            found[i] = given
        return found
