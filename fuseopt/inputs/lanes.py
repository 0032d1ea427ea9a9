"""The lanes of an optimizer: its parameters, each with its gradient and its state.

`Lanes(optimizer)` groups them into kinds. A step can distinguish the lanes of one kind
only by the contents of tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch

from .keys import GRAD, PARAM, LanesDiffer, OddValue, Role, lane_key, only_tensors


@dataclass(eq=False)
class Kind:
    """Lanes that are alike, by lane number; `key`: their common `lane_key`.

    `keys`: the keys of their state. Among these, `tensors` are the keys of tensors, and
    `counters` those of integers in which lanes may differ. `numbers` has the other
    entries, with their values. `flag`: `requires_grad`. `model`: the number of the
    model that replaces the lanes while Dynamo traces the step.
    """

    key: Any
    lanes: list[int]
    keys: tuple[str, ...]
    tensors: tuple[str, ...]
    counters: tuple[str, ...]
    numbers: dict[str, Any]
    has_grad: bool
    has_state: bool
    flag: bool
    model: int = -1


class Lanes:
    """All lanes of an optimizer, and their kinds. See the module.

    `params[i]` is the parameter of lane i, and `groups[i]` the number of its group.
    `states[i]` is its state, or None. `ignore_sizes`: lanes of different sizes are
    alike too. `counters`: lanes with different integers in their state are alike too.
    """

    def __init__(
        self, optimizer: Any, ignore_sizes: bool = False, counters: bool = False
    ) -> None:
        self.ignore_sizes = ignore_sizes
        self.counters = counters
        self.lists = [list(group["params"]) for group in optimizer.param_groups]
        self.params: list[torch.Tensor] = [p for members in self.lists for p in members]
        self.groups = [g for g, members in enumerate(self.lists) for _ in members]
        for group in optimizer.param_groups:
            only_tensors(group["params"])
        own = {*map(id, self.params)}
        for p, s in optimizer.state.items():
            if id(p) not in own:
                what = "the optimizer has state of something besides its parameters"
                raise OddValue(what, s, optimizer.state)
            if type(s) is not dict:
                raise OddValue(
                    "the state of a parameter is not a dict", s, optimizer.state
                )
        get = optimizer.state.get
        self.states: list[dict[str, Any] | None] = [get(p) for p in self.params]
        members_by_key: dict[Any, list[int]] = {}
        for i, (g, p, s) in enumerate(
            zip(self.groups, self.params, self.states, strict=True)
        ):
            members_by_key.setdefault(
                lane_key(g, p, s, ignore_sizes, counters), []
            ).append(i)
        self.kinds = [
            self._kind(key, members) for key, members in members_by_key.items()
        ]
        self._holders = list(optimizer.state)
        self._held = list(optimizer.state.values())
        every = self.tensors(range(len(self.params)))
        #: the ids of all tensors except gradients
        self.owned = {id(t) for (_, (role, _)), t in every.items() if role != GRAD}
        #: The same lanes, all with a gradient, and a byte for each lane: 1 if it has a
        #: gradient here. See presence.
        self.home: Lanes | None = None
        self.present = b""
        #: for a home: returns the trace that ran its last lanes, or None
        self.led_by: Callable[[], Any] = lambda: None
        if len({*map(id, every.values())}) < len(every):
            raise LanesDiffer("lanes share a tensor")

    def _kind(self, key: Any, members: list[int]) -> Kind:
        state = self.states[members[0]]
        entries = state or {}
        tensors = tuple(k for k, v in entries.items() if isinstance(v, torch.Tensor))
        counters = tuple(k for k, v in entries.items() if type(v) is int)
        counters = counters if self.counters else ()
        return Kind(
            key,
            members,
            tuple(entries),
            tensors,
            counters,
            {k: v for k, v in entries.items() if k not in tensors + counters},
            self.params[members[0]].grad is not None,
            state is not None,
            self.params[members[0]].requires_grad,
        )

    def tensors(self, lanes: Sequence[int]) -> dict[tuple[int, Role], torch.Tensor]:
        """Return the tensors of some lanes, by lane and role."""
        tensors: dict[tuple[int, Role], torch.Tensor] = {}
        for i in lanes:
            p = self.params[i]
            tensors[i, (PARAM, "")] = p
            if p.grad is not None:
                tensors[i, (GRAD, "")] = p.grad
            for key, value in (self.states[i] or {}).items():
                if isinstance(value, torch.Tensor):
                    tensors[i, ("state", key)] = value
        return tensors

    def same(self, optimizer: Any) -> bool:
        """Has an optimizer the same parameters, and the same dicts of their states?"""
        lists = [group["params"] for group in optimizer.param_groups]
        if len(lists) != len(self.lists):
            return False
        for params, now in zip(self.lists, lists, strict=True):
            if len(now) != len(params) or not all(map(is_, now, params)):
                return False
        # by identity, without lookups: a tensor's hash is a call of Python
        states = optimizer.state
        return (
            len(states) == len(self._held)
            and all(map(is_, states, self._holders))
            and all(map(is_, states.values(), self._held))
        )

    def holds_as(self, other: Lanes, some: bool = False) -> bool:
        """Do two Lanes have the same parameters and the same state dicts?

        `some`: compare only the states of common parameters.
        """
        if some:
            mine = dict(zip(map(id, self.params), self.states, strict=True))
            theirs = zip(other.params, other.states, strict=True)
            return all(mine.get(id(p), s) is s for p, s in theirs)
        return (
            len(self.params) == len(other.params)
            and all(map(is_, self.params, other.params))
            and all(map(is_, self.states, other.states))
        )

    def reshaped(self) -> bool:
        """Is there a kind whose lanes differ in size?"""
        sizes = ({self.params[i].shape for i in kind.lanes} for kind in self.kinds)
        return any(len(of_a_kind) > 1 for of_a_kind in sizes)

    def grouping(self) -> list[Any]:
        """Return each group's parameters, by identity, and each kind's lanes and
        tensors.
        """
        keys = [(*k.key[:4], [x for x in k.key[4] if len(x) > 3]) for k in self.kinds]
        return [self.lists_of(), [kind.lanes for kind in self.kinds], keys]

    @property
    def unmade(self) -> bool:
        """Does a lane have a gradient, but no state?"""
        return any(kind.has_grad and not kind.has_state for kind in self.kinds)

    def lists_of(self) -> list[list[int]]:
        """Return the parameters of each group, by identity."""
        return [list(map(id, params)) for params in self.lists]

    def of_these_kinds(self, kinds: Iterable[Kind]) -> Lanes:
        """Return the same lanes, grouped into these kinds."""
        found = copy.copy(self)
        found.kinds = sorted(kinds, key=lambda kind: kind.lanes[0])
        found.home, found.present = None, b""
        return found

    def kind_numbers(self) -> list[int]:
        """Return the number of each lane's kind."""
        numbers = [0] * len(self.params)
        for k, kind in enumerate(self.kinds):
            for i in kind.lanes:
                numbers[i] = k
        return numbers


__all__ = ["Kind", "Lanes"]
