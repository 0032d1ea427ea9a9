"""An optimizer -> an object like it that has some of its parameters.

It is one object, which has other parameters in each call: what was compiled for it
serves all of them. The state of a parameter is the optimizer's own dict. Groups that
ask for torch's fused kernels take the foreach form.
"""

from __future__ import annotations

import collections
from collections.abc import Collection
from typing import Any

import torch
from torch.optim import Optimizer

from ..shadow.double import OUTSIDE, is_hooks
from ..shadow.lanes import Unlike
from ..shadow.optimizer import stand_in, unfused


class Part:
    """`itself` is what a step is given. Raises Unlike for an optimizer that no other
    object can stand for.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.itself = stand_in(optimizer)
        self._state: Any = None
        self._groups: list[dict[str, Any]] = []
        self._lists: list[list[torch.Tensor]] = []
        self._hooks: dict[str, Any] = {}  # none, by name

    def take(self, optimizer: Optimizer, some: Collection[int]) -> int:
        """Have those parameters whose ids are given; how many are they?"""
        theirs = optimizer.state
        if type(theirs) not in (dict, collections.defaultdict):
            raise Unlike(f"its state is a {type(theirs).__name__}")
        if type(self._state) is not type(theirs):
            self._state = theirs.copy()
        own = {
            p: theirs[p]
            for group in optimizer.param_groups
            for p in group["params"]
            if id(p) in some and p in theirs
        }
        self._state.clear()
        self._state.update(own)
        n = self._take_groups(optimizer, some)
        inside = vars(self.itself)
        attributes = attributes_of(optimizer)
        for name in [*filter(is_hooks, attributes)]:
            # the same ones in each call, or it would seem to have changed
            attributes[name] = self._hooks.setdefault(name, attributes[name])
        if inside.keys() - attributes.keys() - {"state", "param_groups"}:
            inside.clear()
        inside.update(attributes)
        inside["state"], inside["param_groups"] = self._state, self._groups
        return n

    def _take_groups(self, optimizer: Optimizer, some: Collection[int]) -> int:
        groups = optimizer.param_groups
        del self._groups[len(groups) :], self._lists[len(groups) :]
        while len(self._groups) < len(groups):
            self._groups.append({})
            self._lists.append([])
        n = 0
        for ours, params, group in zip(self._groups, self._lists, groups, strict=True):
            params[:] = [p for p in group["params"] if id(p) in some]
            n += len(params)
            if ours.keys() != group.keys():
                ours.clear()
            ours.update(group)
            ours["params"] = params
            ours.update(unfused(ours))
        return n

    def give_back(self, optimizer: Optimizer) -> None:
        """Give the optimizer the state dicts that the step has created or replaced."""
        state = optimizer.state
        state.update(
            {p: own for p, own in self._state.items() if state.get(p) is not own}
        )

    def drop(self) -> None:
        """Keep nothing of the optimizer's parameters."""
        if self._state is not None:
            self._state.clear()
        for params in self._lists:
            params.clear()


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """What an object like an optimizer has besides groups and state; no hooks."""
    return {
        name: collections.OrderedDict() if is_hooks(name) else x
        for name, x in vars(optimizer).items()
        if name not in OUTSIDE
    }
