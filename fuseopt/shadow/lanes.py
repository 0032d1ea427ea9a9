"""The lanes of an optimizer: its parameters, each with its gradient and its state.

`Lanes(optimizer)` groups them into kinds: lanes that a step can tell apart only by the
contents of tensors. `Lanes.look()` checks before a call that all objects are the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from types import MappingProxyType
from typing import Any

import torch

from ..runtime.guards.given import Given
from ..runtime.guards.lanes import LaneGuard
from ..runtime.guards.library import Held
from ..runtime.guards.tensors import TensorGuard
from .keys import (
    GRAD,
    KINDS,
    NUMBERS,
    PARAM,
    Hung,
    Role,
    Unlike,
    exactly,
    lane_key,
    only_tensors,
)

_GRAD, _FLAG = attrgetter("grad"), attrgetter("requires_grad")
NONE: Mapping[Any, Any] = MappingProxyType({})


@dataclass(eq=False)
class Kind:
    """Lanes that are alike, by lane number; `key`: their common `lane_key`.

    `keys`: those of their state; of these `tensors`: the keys of tensors, `counters`:
    of integers in which lanes may differ, `numbers`: other entries, with their values.
    `flag`: `requires_grad`. `model`: the number of the model that stands for them while
    the step is traced.
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


class Found:
    """The tensors of all lanes in a call, in the order of `Lanes.places`.

    `guard`: the guard that compared all but the gradients, None if Python did. `grads`:
    the gradients; `late`: (index among the tensors, index in `grads`) of each.
    `compared`: the guard of the step whose tensors were compared in the same pass; set
    to None when the step takes the result. `rest_same`: is all else that the optimizer
    holds known to be unchanged? `counters`: values by (lane, key of its state).
    `numbers`: by kind, the other numbers in the state.
    """

    compared: TensorGuard | None = None
    rest_same = False

    def __init__(
        self,
        tensors: list[Any],
        guard: LaneGuard | None = None,
        grads: Sequence[Any] = (),
        late: Sequence[tuple[int, int]] = (),
        counters: Mapping[tuple[int, str], int] = NONE,
        numbers: Mapping[int, Mapping[str, Any]] = NONE,
    ) -> None:
        self._tensors = tensors
        self.counters, self.numbers = counters, numbers
        self.guard, self.grads, self.late = guard, grads, late
        if guard is not None:
            self.compared, self.rest_same = guard.tensors, guard.rest_same

    def tensor(self, place: int) -> Any:
        """One of them."""
        t = self._tensors[place]
        return self.tensors()[place] if t is None else t

    def tensors(self) -> list[Any]:
        """All of them."""
        if not self.late:
            return self._tensors
        tensors = self._tensors.copy()
        for place, k in self.late:
            tensors[place] = self.grads[k]
        return tensors


class Lanes:
    """All lanes of an optimizer, and their kinds. See the module.

    `params[i]` is the parameter of lane i, `groups[i]` the number of its group,
    `states[i]` its state, None while it has none. `loose`: lanes of other sizes are
    alike as well; `counters`: and those with other integers in their state.
    """

    def __init__(
        self, optimizer: Any, loose: bool = False, counters: bool = False
    ) -> None:
        self.loose = loose
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
                raise Hung(what, s, optimizer.state)
            if type(s) is not dict:
                raise Hung("the state of a parameter is no dict", s, optimizer.state)
        get = optimizer.state.get
        self.states: list[dict[str, Any] | None] = [get(p) for p in self.params]
        members_by_key: dict[Any, list[int]] = {}
        for i, (g, p, s) in enumerate(
            zip(self.groups, self.params, self.states, strict=True)
        ):
            members_by_key.setdefault(lane_key(g, p, s, loose, counters), []).append(i)
        self.kinds = [
            self._kind(key, members) for key, members in members_by_key.items()
        ]
        self._holders = list(optimizer.state)
        self._held = list(optimizer.state.values())
        every = self.tensors(range(len(self.params)))
        #: by identity, the tensors that are no gradients
        self.owned = {id(t) for (_, (role, _)), t in every.items() if role != GRAD}
        self.arrange()
        if len({*map(id, every.values())}) < len(every):
            raise Unlike("lanes have a tensor in common")

    def arrange(self) -> None:
        """Set what follows from the kinds, after they were set."""
        order = [i for kind in self.kinds for i in kind.lanes]
        #: the kind of each lane, by number
        self.kind_of = [0] * len(self.params)
        for k, kind in enumerate(self.kinds):
            for i in kind.lanes:
                self.kind_of[i] = k
        self._params = [self.params[i] for i in order]
        self._known_grads = [p.grad is None for p in self._params]
        self._flags = [p.requires_grad for p in self._params]
        self._states = [self.states[i] for i in order]
        self._order = order
        self._guard: LaneGuard | None = None
        #: is the guard to be made in this look, or in the next?
        self.young = False
        self._steady = True  # have only gradients been replaced so far?
        self._found: list[Any] = []  # the tensors of the guard, None for gradients
        self._late: list[tuple[int, int]] = []
        #: have lanes been given other objects since the guard was made?
        self.replaced = False

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
        """The tensors of some lanes, by lane and role."""
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

    def forget(self) -> None:
        """Let the next look compare everything in Python."""
        self._guard = None

    def same(self, optimizer: Any) -> bool:
        """Has an optimizer the same parameters, and the same dicts of their states?"""
        lists = [group["params"] for group in optimizer.param_groups]
        if len(lists) != len(self.lists):
            return False
        for params, now in zip(self.lists, lists, strict=True):
            if len(now) != len(params) or not all(map(is_, now, params)):
                return False
        # no key is looked up: a tensor's hash is a call of Python
        states = optimizer.state
        return (
            len(states) == len(self._held)
            and all(map(is_, states, self._holders))
            and all(map(is_, states.values(), self._held))
        )

    def look(
        self,
        optimizer: Any,
        rest: Held,
        helper: ctypes.PyDLL | None = None,
        given: Given | None = None,
    ) -> Found | None:
        """The tensors of all lanes, if all but gradients are the same objects, else
        None.

        Compares no metadata. `helper`, `rest`: as in LaneGuard. `given`: gradients that
        lanes do not have yet; they are assigned before Python looks.
        """
        lists = [group["params"] for group in optimizer.param_groups]
        if self._guard is not None:
            arguments = vars(optimizer), lists, optimizer.state
            grads = None
            if given is not None and given.grads is not None:
                grads = self._guard.look(*arguments, given)
            if grads is None:
                if given is not None:
                    given.put()
                grads = self._guard.look(*arguments)
            if grads is not None:
                return Found(self._found, self._guard, grads, self._late)
        if given is not None:
            given.put()
        grads = list(map(_GRAD, self._params))
        if [g is None for g in grads] != self._known_grads or not self.same(optimizer):
            return None
        if self._guard is not None:
            # a step that gives lanes other objects each time would be guarded anew
            # at each call
            self._guard, self._steady = None, False
            self._found = []
            self.replaced = True
        tensors = self._look_closely(grads)
        if tensors is None:
            return None
        if helper is not None and self._steady and not self.young:
            self._guard_from_now(helper, tensors.tensors(), optimizer.state, rest)
        self.young = False
        return tensors

    def _guard_from_now(
        self,
        helper: ctypes.PyDLL,
        tensors: list[Any],
        state: dict[Any, Any],
        rest: Held,
    ) -> None:
        """Use the helper from now on, if there are no numbers to be compared."""
        if any(kind.numbers or kind.counters for kind in self.kinds):
            return
        record = self._params, self._states, KINDS, self.lists, state, rest
        self._guard = LaneGuard(helper, *record)
        self._found = tensors.copy()
        self._late = []
        place = lane = 0
        for kind in self.kinds:
            n = len(kind.lanes)
            if kind.has_grad:
                first = place + n
                self._late += zip(
                    range(first, first + n), range(lane, lane + n), strict=True
                )
                # no gradient is kept alive
                self._found[first : first + n] = [None] * n
            place += n * (1 + kind.has_grad + len(kind.tensors))
            lane += n

    def _look_closely(self, grads: list[Any]) -> Found | None:
        """The part of `look` after the lists of parameters and states were compared."""
        if list(map(_FLAG, self._params)) != self._flags:
            return None
        tensors: list[Any] = []
        counters: dict[tuple[int, str], int] = {}
        new_numbers: dict[int, dict[str, Any]] = {}
        lane = 0
        for k, kind in enumerate(self.kinds):
            span = slice(lane, lane + len(kind.lanes))
            lane = span.stop
            tensors.extend(self._params[span])
            if kind.has_grad:
                tensors.extend(grads[span])
            states: list[Any] = self._states[span]
            if not kind.has_state:
                continue
            if set(map(len, states)) != {len(kind.keys)}:
                return None
            try:
                for key in kind.tensors:
                    tensors.extend(map(itemgetter(key), states))
                numbers = [list(map(itemgetter(x), states)) for x in kind.numbers]
                counts = [list(map(itemgetter(x), states)) for x in kind.counters]
            except KeyError:
                return None
            for values in numbers:
                # they may have changed, to equal numbers in all lanes
                if all(map(is_, values, repeat(values[0]))):
                    continue
                if len(set(map(exactly, values))) > 1:
                    return None
            if numbers:
                new_numbers[k] = {
                    key: x[0] for key, x in zip(kind.numbers, numbers, strict=True)
                }
                if not set(map(type, new_numbers[k].values())) <= set(NUMBERS):
                    return None
            for key, values in zip(kind.counters, counts, strict=True):
                if set(map(type, values)) != {int}:
                    return None
                places = zip(kind.lanes, repeat(key))
                counters.update(zip(places, values, strict=False))
        if not set(map(type, tensors)) <= set(KINDS):
            return None
        return Found(tensors, counters=counters, numbers=new_numbers)

    def holds_as(self, other: Lanes, some: bool = False) -> bool:
        """Do two Lanes have the same parameters and the same state dicts?

        `some`: compare only the states of parameters that both have.
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
        """Each group's parameters, by identity; each kind's lanes, and its tensors."""
        keys = [(*k.key[:4], [x for x in k.key[4] if len(x) > 3]) for k in self.kinds]
        return [self.lists_of(), [kind.lanes for kind in self.kinds], keys]

    @property
    def unmade(self) -> bool:
        """Has a lane a gradient, and no state?"""
        return any(kind.has_grad and not kind.has_state for kind in self.kinds)

    def lists_of(self) -> list[list[int]]:
        """The parameters of each group, by identity."""
        return [list(map(id, params)) for params in self.lists]

    def places(self) -> list[tuple[int, Role]]:
        """Lane and role of each tensor that `look` returns."""
        places: list[tuple[int, Role]] = []
        for kind in self.kinds:
            places.extend((i, (PARAM, "")) for i in kind.lanes)
            if kind.has_grad:
                places.extend((i, (GRAD, "")) for i in kind.lanes)
            for key in kind.tensors:
                places.extend((i, ("state", key)) for i in kind.lanes)
        return places


__all__ = ["Found", "Kind", "Lanes"]
