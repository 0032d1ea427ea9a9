"""Stand-in of an optimizer that has only some of its parameters.

It is one object, which gets other parameters for each call, so that one compiled step
serves all of them. It shares the state dict of each parameter with the optimizer.
Groups with `fused=True` get the foreach form.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from itertools import repeat
from operator import getitem, is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..inputs.values import OUTSIDE, is_hooks
from ..shadow.stand_in import stand_in, unfused

#: Most sets of parameters of which a record is kept.
MOST = 4096


class Record(NamedTuple):
    """Parameters of a call, where they are in the groups, and their state dicts."""

    params: list[torch.Tensor]
    #: of each parameter, by group and place
    groups: list[int]
    places: list[int]
    #: the parameters of each group
    lists: list[list[torch.Tensor]]
    #: of those that have one
    states: dict[torch.Tensor, Any]

    def in_groups(self, lists: Sequence[list[torch.Tensor]]) -> bool:
        """Are the parameters where they were?"""
        try:
            found = map(getitem, map(lists.__getitem__, self.groups), self.places)
            return len(lists) == len(self.lists) and all(map(is_, found, self.params))
        except IndexError:
            return False


class PartialOptimizer:
    """Stand-in: `stand_in` is the argument of a step. Raises LanesDiffer for an
    optimizer that cannot have one.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.stand_in = stand_in(optimizer)
        self._state: Any = None
        self._groups: list[dict[str, Any]] = []
        self._lists: list[list[torch.Tensor]] = []
        self._hooks: dict[str, Any] = {}  # empty ones, by name
        #: of the present call; of earlier ones, by the id of their first parameter
        self._taken: Record | None = None
        self._records: dict[int, Record] = {}

    def take(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> int:
        """Take the parameters that are in a group, and return their number. Raises
        LanesDiffer.
        """
        state = optimizer.state
        if type(state) not in (dict, collections.defaultdict):
            raise LanesDiffer(f"its state is a {type(state).__name__}")
        if type(self._state) is not type(state):
            self._state = state.copy()
        taken = self._taken = self._record(optimizer, params)
        self._state.clear()
        self._state.update(taken.states)
        self._take_groups(optimizer, taken)
        part = vars(self.stand_in)
        attributes = attributes_of(optimizer, self._hooks)
        if part.keys() - attributes.keys() - {"state", "param_groups"}:
            part.clear()
        part.update(attributes)
        part["state"], part["param_groups"] = self._state, self._groups
        return len(taken.params)

    def _record(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> Record:
        """Return the record of the parameters: an earlier one if it still holds."""
        lists = [group["params"] for group in optimizer.param_groups]
        known = self._records.get(id(params[0])) if params else None
        if (
            known is None
            or len(known.params) != len(params)
            or {*map(id, known.params)} != {*map(id, params)}
            or not known.in_groups(lists)
        ):
            known = _located(lists, params)
            if len(self._records) >= MOST:
                self._records.clear()
        state = optimizer.state
        states = [*map(state.get, known.params)]
        if (
            len(known.states) != len(states)
            or any(map(is_, states, repeat(None)))
            or not all(map(is_, known.states.values(), states))
        ):
            pairs = zip(known.params, states, strict=True)
            of_those = {p: x for p, x in pairs if x is not None or p in state}
            known = known._replace(states=of_those)
        if params:
            self._records[id(params[0])] = known
        return known

    def _take_groups(self, optimizer: Optimizer, taken: Record) -> None:
        groups = optimizer.param_groups
        del self._groups[len(groups) :], self._lists[len(groups) :]
        while len(self._groups) < len(groups):
            self._groups.append({})
            self._lists.append([])
        rows = zip(self._groups, self._lists, taken.lists, groups, strict=True)
        for target, params, those, group in rows:
            params[:] = those
            if target.keys() != group.keys():
                target.clear()
            target.update(group)
            target["params"] = params
            target.update(unfused(target))

    def give_back(self, optimizer: Optimizer) -> None:
        """Add the state dicts that the step created or replaced to the optimizer's."""
        own, taken = self._state, self._taken
        if (
            taken is not None
            and len(own) == len(taken.states)
            and all(map(is_, own, taken.states))
            and all(map(is_, own.values(), taken.states.values()))
        ):
            return
        state = optimizer.state
        state.update({p: x for p, x in own.items() if state.get(p) is not x})

    def forget(self) -> None:
        """Release parameters and states of earlier calls."""
        self._records.clear()

    def drop(self) -> None:
        """Release the parameters and the state of this call."""
        self._taken = None
        if self._state is not None:
            self._state.clear()
        for params in self._lists:
            params.clear()


def _located(lists: Sequence[Any], params: Sequence[torch.Tensor]) -> Record:
    """Return the record of those parameters that a group has, without states."""
    places = {
        id(p): (g, i)
        for g, of_group in enumerate(lists)
        for i, p in enumerate(of_group)
    }
    those = [p for p in params if id(p) in places]
    those.sort(key=lambda p: places[id(p)])
    at = [places[id(p)] for p in those]
    of_groups: list[list[torch.Tensor]] = [[] for _ in lists]
    for (g, _), p in zip(at, those, strict=True):
        of_groups[g].append(p)
    return Record(those, [g for g, _ in at], [i for _, i in at], of_groups, {})


def attributes_of(optimizer: Optimizer, hooks: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of an optimizer besides groups and state, without hooks.

    `hooks`: by name, the empty dicts in place of hooks. Calls with one such dict give
    the same objects, since other ones would be a change.
    """
    attributes = vars(optimizer).copy()
    for name in OUTSIDE.intersection(attributes):
        del attributes[name]
    for name in filter(is_hooks, vars(optimizer)):
        if name not in hooks:
            hooks[name] = collections.OrderedDict()
        attributes[name] = hooks[name]
    return attributes
