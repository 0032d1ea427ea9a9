"""Pack the state of one optimizer at rest.

Between steps a lane's state has only packed tensors. Within a compiled step it also has
the unpacked ones. These are the same objects each time and have no memory (see
`replicate/packed.py`). Within a step in eager they have contents.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import contains
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from ..replicate.models import without_contents
from ..runtime.undo import at_once
from .beside import Beside, State, holds, update
from .formats import Format
from .packing import full_precision, key_of, like_unpacked, packed_in, parts_of
from .rule import Rule

#: What the state of a parameter may be. Their methods are functions of C.
DICTS = (dict, collections.OrderedDict, collections.defaultdict)


class _Lane(NamedTuple):
    """Parameter and its state. `packed` is the result of `packed_in`; `hollow` has the
    unpacked tensors without memory, by key.
    """

    param: torch.Tensor
    state: State
    packed: Mapping[str, tuple[Format, Mapping[str, str]]]
    hollow: dict[str, torch.Tensor]

    def unpack(self) -> None:
        """Add the unpacked tensors, with contents, to the state."""
        for target, (form, keys) in self.packed.items():
            self.state[target] = form.unpack(parts_of(self.state, keys))

    def pack(self) -> None:
        """Pack the unpacked tensors and remove them. A tensor with a new layout stays
        unpacked, and its packed one is removed.
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


class PackedState:
    """Packed state of an optimizer, as a rule chooses it."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._lanes: list[_Lane] = []
        #: the keys, if users have entries too, and the values of the optimizer's state
        self._entries: tuple[list[Any], list[Any]] = [], []
        self._unpacked = Beside()
        self._sizes: list[int] = []
        #: (key, the states with this key of a packed tensor)
        self._packed_keys: list[tuple[str, list[State]]] = []
        #: the number of tensors packed so far
        self._n = 0
        self._warned = False

    def pack_new(self, optimizer: Optimizer) -> None:
        """Pack the state that was made, loaded or assigned since the last call.

        Raises UnsupportedInput, and then leaves the state unchanged.
        """
        if self._holds(optimizer):
            return
        names = self.rule.names(optimizer)
        every = _of_tensors(optimizer)
        news = [self._packed(p, state, names.get(p)) for p, state in every]
        states = [state for _, state in every]
        _replace(states, news)
        self._warn_of_unknown_keys(states)
        former = {id(x.state): x.hollow for x in self._lanes}
        self._lanes = [_lane(p, state, former.get(id(state), {})) for p, state in every]
        self._sizes = [*map(len, states)]
        self._unpacked = Beside(states, [x.hollow for x in self._lanes])
        by_packed_key: dict[str, list[State]] = {}
        for lane in self._lanes:
            for _, of_parts in lane.packed.values():
                by_packed_key.setdefault(of_parts[""], []).append(lane.state)
        self._packed_keys, entries = [*by_packed_key.items()], optimizer.state
        keys = [] if len(entries) == len(states) else [*entries]
        self._entries = keys, [*entries.values()]

    @torch.no_grad()
    def _packed(self, param: torch.Tensor, state: Any, name: str | None) -> State:
        """Return a state packed by the rule: the same object if it is packed so
        already.
        """
        if type(state) not in DICTS:
            raise UnsupportedInput(
                "storage: the state of a parameter has the class "
                f"{type(state).__name__}, which may run code; use a dict"
            )
        former = packed_in(state)
        if any(map(_is_hollow, state.values())):
            state = {k: v for k, v in state.items() if not _is_hollow(v)}
        wanted = {x: self.rule.wanted(x, param, name) for x in former}
        other = {
            target
            for target, (form, _) in former.items()
            if form is not getattr(wanted[target], "form", None)
        }
        wide = full_precision(state, other) if other else state
        packed: State = {}
        for key, value in wide.items():
            form = (
                self.rule.of(key, value, param, name) if isinstance(key, str) else None
            )
            if form is None:
                packed[key] = value
                continue
            parts = form.empty(value, self._n)
            form.pack(value, parts)
            packed.update({key_of(key, form, x): t for x, t in parts.items()})
            self._n += 1
        return state if [*packed] == [*state] else packed

    def _warn_of_unknown_keys(self, states: list[State]) -> None:
        """Warn, once, about keys that the user names and no state has."""
        known = {key for state in states for key in (*state, *packed_in(state))}
        unknown = [key for key in self.rule.keys if key not in known]
        if unknown and any(states) and not self._warned:
            self._warned = True
            warnings.warn(
                f"fuseopt: storage names {', '.join(unknown)}, which no state has; "
                f"the state has {', '.join(sorted(map(str, known)))}",
                RuntimeWarning,
                stacklevel=2,
            )

    def restore(self, optimizer: Optimizer) -> None:
        """Unpack all of the state for good."""
        self._forget()
        states = [state for _, state in _of_tensors(optimizer)]
        _replace(states, [full_precision(state) for state in states])

    def _forget(self) -> None:
        """Let the next call check all states."""
        self._unpacked, self._entries = Beside(), ([], [])

    def _holds(self, optimizer: Optimizer) -> bool:
        """Has each lane the same state as before, all of it packed?"""
        unpacked = self._unpacked
        return (
            holds(optimizer.state, *self._entries)
            and [*map(len, unpacked.states)] == self._sizes
            and not any(any(map(contains, x, repeat(key))) for key, x in unpacked.keys)
            and all(all(map(contains, x, repeat(key))) for key, x in self._packed_keys)
        )

    def hollow(self) -> contextlib.AbstractContextManager[None]:
        """Add the unpacked tensors, without memory, to the state within the context."""
        return self._unpacked.within()

    @contextlib.contextmanager
    def unpacked(self, every: bool) -> Iterator[None]:
        """Unpack the state of all lanes that have a gradient within the context.
        `every` adds the other lanes.
        """
        lanes = [x for x in self._lanes if every or x.param.grad is not None]
        self._forget()
        try:
            with torch.no_grad():
                for lane in lanes:
                    lane.unpack()
            yield
        finally:
            with torch.no_grad():
                for lane in lanes:
                    lane.pack()


def _replace(states: Sequence[State], news: Sequence[State]) -> None:
    """Replace the contents of states in one C call, which no signal interrupts."""
    calls: list[Callable[[], object]] = []
    for state, new in zip(states, news, strict=True):
        if new is not state:
            clear = functools.partial(type(state).clear, state)
            calls += [clear, update(state, new)]
    at_once(calls)


def _of_tensors(optimizer: Optimizer) -> list[tuple[torch.Tensor, Any]]:
    """Return the states of parameters. Users keep other entries beside these."""
    return [(p, x) for p, x in optimizer.state.items() if isinstance(p, torch.Tensor)]


def _is_hollow(t: Any) -> bool:
    """Has a tensor elements, but no memory? An interrupted step may leave such
    tensors.
    """
    return (
        isinstance(t, torch.Tensor)
        and bool(t.numel())
        and not t.untyped_storage().nbytes()
    )


def _lane(
    param: torch.Tensor, state: State, former: Mapping[str, torch.Tensor]
) -> _Lane:
    """Return a lane with its present state. Reuse the former tensors without memory if
    they fit.
    """
    packed = packed_in(state)
    hollow = {}
    for target, (_, keys) in packed.items():
        like = like_unpacked(parts_of(state, keys))
        t = former.get(target)
        if t is None or (t.shape, t.device) != (like.shape, like.device):
            t = without_contents(like)
        hollow[target] = t
    return _Lane(param, state, packed, hollow)
