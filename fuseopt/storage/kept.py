"""The state of one optimizer, packed at rest.

Between steps a lane's state has only packed tensors. Within a compiled step it also has
the unpacked ones, the same objects each time, which have no memory (see
`replicate/packed.py`). Within a step in eager these have contents.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Iterator, Mapping
from itertools import repeat
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from ..replicate.models import without_contents
from .formats import Format
from .packing import key_of, like_unpacked, packed_in, parts_of
from .rule import Rule

_State = dict[str, Any]


class _Lane(NamedTuple):
    """A parameter and its state. `packed`: as of `packed_in`; `hollow`: by key, the
    unpacked tensors without memory.
    """

    param: torch.Tensor
    state: _State
    packed: Mapping[str, tuple[Format, Mapping[str, str]]]
    hollow: dict[str, torch.Tensor]

    def unpack(self) -> None:
        """Add the unpacked tensors, with contents, to the state."""
        for target, (form, keys) in self.packed.items():
            self.state[target] = form.unpack(parts_of(self.state, keys))

    def pack(self) -> None:
        """Pack them, and remove them. One that has got another layout stays unpacked,
        and the packed one goes.
        """
        for target, (form, keys) in self.packed.items():
            value, like = self.state.get(target), self.hollow[target]
            if isinstance(value, torch.Tensor) and (
                (value.shape, value.dtype) == (like.shape, like.dtype)
            ):
                form.pack(value, parts_of(self.state, keys))
                del self.state[target]
            else:
                for key in keys.values():
                    self.state.pop(key, None)


class Kept:
    """The packed state of an optimizer, as a rule wants it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._lanes: list[_Lane] = []
        self._states: list[_State] = []
        self._hollow: list[dict[str, torch.Tensor]] = []
        self._sizes: list[int] = []
        #: (key, the states that have it packed)
        self._keys: list[tuple[str, list[_State]]] = []
        #: how many tensors were ever packed
        self._n = 0

    def pack_new(self, optimizer: Optimizer) -> None:
        """Pack what is not packed yet: state that was made, loaded or assigned.

        Raises UnsupportedInput; then the state is as it was.
        """
        if self._holds(optimizer):
            return
        news = [self._packed(p, state) for p, state in optimizer.state.items()]
        states = [*optimizer.state.values()]
        for state, new in zip(states, news, strict=True):
            state.update(new)
            for target in packed_in(new):
                del state[target]
        former = {id(x.state): x.hollow for x in self._lanes}
        self._lanes = [
            _lane(p, state, former.get(id(state), {}))
            for p, state in optimizer.state.items()
        ]
        self._states, self._sizes = states, [*map(len, states)]
        self._hollow = [x.hollow for x in self._lanes]
        by_key: dict[str, list[_State]] = {}
        for lane in self._lanes:
            for key in lane.hollow:
                by_key.setdefault(key, []).append(lane.state)
        self._keys = [*by_key.items()]

    @torch.no_grad()
    def _packed(self, param: torch.Tensor, state: Any) -> _State:
        """The packed tensors to be added to a state, by key."""
        if type(state) is not dict:
            raise UnsupportedInput("storage: the state of a parameter is no dict")
        new: _State = {}
        for key, value in state.items():
            form = self.rule.of(key, value, param) if isinstance(key, str) else None
            if form is not None:
                parts = form.empty(value, self._n)
                form.pack(value, parts)
                new.update({key_of(key, form, x): t for x, t in parts.items()})
                self._n += 1
        return new

    def restore(self, optimizer: Optimizer) -> None:
        """Unpack all of the state, for good."""
        self._states = []
        with torch.no_grad():
            for state in optimizer.state.values():
                for target, (form, keys) in packed_in(state).items():
                    wide = form.unpack(parts_of(state, keys))
                    for key in keys.values():
                        del state[key]
                    state[target] = wide

    def _holds(self, optimizer: Optimizer) -> bool:
        """Has each lane the state that it had, all of it packed?"""
        state = optimizer.state
        return (
            len(state) == len(self._states)
            and all(map(is_, state.values(), self._states))
            and [*map(len, self._states)] == self._sizes
        )

    @contextlib.contextmanager
    def hollow(self) -> Iterator[None]:
        """Within, the state has the unpacked tensors too, without memory."""
        try:
            _each(dict.update, self._states, self._hollow)
            yield
        finally:
            for key, states in self._keys:
                _each(dict.pop, states, repeat(key), repeat(None))

    @contextlib.contextmanager
    def unpacked(self, every: bool) -> Iterator[None]:
        """Within, the state has the unpacked tensors of all lanes that have a gradient;
        `every`: those of all lanes.
        """
        lanes = [x for x in self._lanes if every or x.param.grad is not None]
        self._states = []  # the next call looks at all of it
        try:
            with torch.no_grad():
                for lane in lanes:
                    lane.unpack()
            yield
        finally:
            with torch.no_grad():
                for lane in lanes:
                    lane.pack()


def _each(function: Callable[..., Any], *columns: Any) -> None:
    """Call a C function with each row of some columns."""
    collections.deque(map(function, *columns), 0)


def _lane(
    param: torch.Tensor, state: _State, former: Mapping[str, torch.Tensor]
) -> _Lane:
    """A lane with its present state; the former tensors without memory, if they fit."""
    packed = packed_in(state)
    hollow = {}
    for target, (_, keys) in packed.items():
        like = like_unpacked(parts_of(state, keys))
        t = former.get(target)
        if t is None or (t.shape, t.device) != (like.shape, like.device):
            t = without_contents(like)
        hollow[target] = t
    return _Lane(param, state, packed, hollow)
