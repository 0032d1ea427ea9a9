"""Stand-in of an optimizer that has only some of its parameters.

It is one object, which gets other parameters for each call, so that one compiled step
serves all of them. It shares the state dict of each parameter with the optimizer.
Groups with `fused=True` get the foreach form.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..inputs.values import OUTSIDE, is_hooks
from ..shadow.stand_in import stand_in, unfused


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
        #: by id of a parameter: its group, and its place in that
        self._places: dict[int, tuple[int, int]] = {}

    def take(self, optimizer: Optimizer, params: Sequence[torch.Tensor]) -> int:
        """Take the parameters that are in a group, and return their number. Raises
        LanesDiffer.
        """
        state = optimizer.state
        if type(state) not in (dict, collections.defaultdict):
            raise LanesDiffer(f"its state is a {type(state).__name__}")
        if type(self._state) is not type(state):
            self._state = state.copy()
        found = self._find(optimizer.param_groups, params)
        states = {p: state[p] for _, _, p in found if p in state}
        self._state.clear()
        self._state.update(states)
        self._take_groups(optimizer, found)
        part = vars(self.stand_in)
        attributes = vars(optimizer).copy()
        for name in OUTSIDE.intersection(attributes):
            del attributes[name]
        for name in filter(is_hooks, vars(optimizer)):
            # the same objects in each call, since other ones would be a change
            if name not in self._hooks:
                self._hooks[name] = collections.OrderedDict()
            attributes[name] = self._hooks[name]
        if part.keys() - attributes.keys() - {"state", "param_groups"}:
            part.clear()
        part.update(attributes)
        part["state"], part["param_groups"] = self._state, self._groups
        return len(found)

    def _find(
        self, groups: Sequence[Any], params: Sequence[torch.Tensor]
    ) -> list[tuple[int, int, torch.Tensor]]:
        """Return group, place in it and parameter of each, by group and place."""
        lists = [group["params"] for group in groups]
        places = [self._places.get(id(p)) for p in params]
        if not all(
            at is not None
            and at[0] < len(lists)
            and at[1] < len(lists[at[0]])
            and lists[at[0]][at[1]] is p
            for at, p in zip(places, params, strict=True)
        ):
            self._places = {
                id(p): (g, i)
                for g, of_group in enumerate(lists)
                for i, p in enumerate(of_group)
            }
            places = [self._places.get(id(p)) for p in params]
        pairs = zip(places, params, strict=True)
        return sorted(
            ((*at, p) for at, p in pairs if at is not None), key=lambda x: x[:2]
        )

    def _take_groups(
        self, optimizer: Optimizer, found: Sequence[tuple[int, int, torch.Tensor]]
    ) -> None:
        groups = optimizer.param_groups
        del self._groups[len(groups) :], self._lists[len(groups) :]
        while len(self._groups) < len(groups):
            self._groups.append({})
            self._lists.append([])
        for params in self._lists:
            params.clear()
        for g, _, p in found:
            self._lists[g].append(p)
        triples = zip(self._groups, self._lists, groups, strict=True)
        for target, params, group in triples:
            if target.keys() != group.keys():
                target.clear()
            target.update(group)
            target["params"] = params
            target.update(unfused(target))

    def give_back(self, optimizer: Optimizer) -> None:
        """Add the state dicts that the step created or replaced to the optimizer's."""
        state = optimizer.state
        pairs = self._state.items()
        state.update({p: own for p, own in pairs if state.get(p) is not own})

    def drop(self) -> None:
        """Release the optimizer's parameters and their state."""
        if self._state is not None:
            self._state.clear()
        for params in self._lists:
            params.clear()


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer besides groups and state, without hooks."""
    return {
        name: collections.OrderedDict() if is_hooks(name) else value
        for name, value in vars(optimizer).items()
        if name not in OUTSIDE
    }
