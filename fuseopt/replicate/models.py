"""Models: for each kind of lanes a lane in their place, which Dynamo traces.

A model is a parameter, a gradient and a state like those of its lanes, and belongs to
no optimizer. Its tensors have memory only during a trace or a capture. Models outlive
their lanes. So one trace serves a call no matter which lanes have gradients or state in
it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .. import compat
from ..inputs.keys import GRAD, PARAM, LanesDiffer, Role, lane_key
from ..inputs.lanes import Kind, Lanes
from .packed import Packing
from .packed import Tensors as Packed

#: The first value of integers in the state of models; each differs from all others.
COUNTED = 301
#: The role of a tensor beside a parameter that does not belong to the optimizer.
BESIDE = "beside"
#: The largest number of models of an optimizer, or of each kind of lanes if that is
#: more. A kind needs models with and without state, with and without gradient.
MOST, MOST_OF_A_KIND = 48, 4


class Models:
    """The models of an optimizer's kinds of lanes, by number.

    `of`: the model by the key of a kind. `params`, `groups`: each model's parameter and
    the number of its group. `state`: by parameter, as the optimizer's. `beside`: by
    model, a tensor for each of `columns`. A column maps the parameter's dtype to that
    of the tensor; for None, the tensor is a number. `packing`: the packed format of
    lanes.
    """

    def __init__(
        self,
        groups: int,
        ignore_sizes: bool,
        counters: bool,
        columns: Sequence[Mapping[torch.dtype, torch.dtype] | None] = (),
        packing: Packing | None = None,
    ) -> None:
        self.ignore_sizes = ignore_sizes
        self.counters = counters
        self.of: dict[Any, int] = {}
        self.params: list[torch.Tensor] = []
        self.groups: list[int] = []
        self.n_groups = groups
        self._twins: dict[int, int] = {}
        self.state: dict[torch.Tensor, dict[str, Any]] = {}
        self.columns = columns
        self.beside: dict[int, list[torch.Tensor]] = {}
        self.packing = packing
        #: by a model's counter value: (the model, the key in its state)
        self.counted: dict[int, tuple[int, str]] = {}
        #: the same by the id of that integer object, which nothing else uses
        self.stand_ins: dict[int, tuple[int, str]] = {}
        self._next = COUNTED
        self._most = MOST
        #: True while the models' tensors have memory
        self.filled = False

    def take(self, lanes: Lanes) -> None:
        """Ensure that each kind of some lanes has a model."""
        self._most = max(self._most, MOST_OF_A_KIND * len(lanes.kinds))
        for kind in lanes.kinds:
            if kind.key not in self.of:
                if len(self.params) >= self._most:
                    raise LanesDiffer("its lanes change too often")
                self.of[kind.key] = self._add(lanes, kind)
            kind.model = self.of[kind.key]

    def twin(self, number: int) -> int:
        """Return a copy of a model without lanes.

        With two models in a trace, fuseopt can distinguish a tensor that all lanes
        share from a tensor of one lane.
        """
        if number not in self._twins:
            self._twins[number] = self._copy(number)
        return self._twins[number]

    def without_gradients(self, numbers: Iterable[int]) -> set[int]:
        """Return models like these, but without a gradient."""
        models = set()
        for number in [*numbers]:
            p = self.params[number]
            if p.grad is not None and len(self.params) < self._most:
                parts = self.groups[number], p, self.state.get(p)
                key = lane_key(*parts, self.ignore_sizes, self.counters, False)
                if key not in self.of:
                    self.of[key] = self._copy(number, grad=False)
                models.add(self.of[key])
        return models

    def _add(self, lanes: Lanes, kind: Kind) -> int:
        i = kind.lanes[0]
        return self._like(lanes.params[i], lanes.states[i], lanes.groups[i])

    def _copy(self, number: int, grad: bool = True) -> int:
        p = self.params[number]
        return self._like(p, self.state.get(p), self.groups[number], grad)

    def _like(
        self,
        of: torch.Tensor,
        state: Mapping[str, Any] | None,
        group: int,
        grad: bool = True,
    ) -> int:
        """Add a model like a parameter and its state; return its number."""
        number, p = len(self.params), without_contents(of)
        if grad and of.grad is not None:
            p.grad = without_contents(of.grad)
        if state is not None:
            self.state[p] = {
                k: without_contents(v) if isinstance(v, torch.Tensor) else v
                for k, v in state.items()
            }
        self.params.append(p)
        self.groups.append(group)
        self.beside[number] = [
            torch.zeros((), dtype=torch.float32, device=of.device)
            if dtypes is None
            else without_contents(torch.empty_like(of, dtype=dtypes[of.dtype]).detach())
            for dtypes in self.columns
        ]
        self._count(number)
        return number

    def _count(self, number: int) -> None:
        """Give each integer in a model's state a value that no other integer has."""
        state = self.state.get(self.params[number], {})
        for key, value in state.items() if self.counters else ():
            if type(value) is int and (number, key) not in self.counted.values():
                # an object without other references: Python caches small integers
                while self._next is int(str(self._next)):
                    self._next += 100
                state[key] = self._next
                self.counted[self._next] = number, key
                self.stand_ins[id(self._next)] = number, key
                self._next += 2

    def adopt(self, state: Mapping[torch.Tensor, Mapping[str, Any]]) -> bool:
        """Take over state that tracing created for models; return True if there was
        any.
        """
        keys = {number: key for key, number in self.of.items()}
        adopted = False
        for number, p in enumerate(self.params):
            if p in self.state or not (p in state and p.grad is not None):
                continue
            adopted = True
            self.state[p] = dict(state[p])
            self._count(number)
            if number in keys:
                del self.of[keys[number]]
                self.of.setdefault(self._key(number), number)
        return adopted

    def _key(self, number: int) -> Any:
        p = self.params[number]
        parts = self.groups[number], p, self.state.get(p)
        return lane_key(*parts, self.ignore_sizes, self.counters)

    def follow(self, kind: Kind, numbers: Mapping[str, Any]) -> None:
        """Take over new numbers in the state of a kind's lanes, equal in all lanes."""
        state = self.state[self.params[kind.model]]
        if all(state[k] is v for k, v in numbers.items()):
            return
        state.update(numbers)
        if kind.model in self._twins:
            self.state[self.params[self._twins[kind.model]]].update(numbers)
        self.of = {k: n for k, n in self.of.items() if n != kind.model}
        self.of.setdefault(self._key(kind.model), kind.model)

    def members(self, lanes: Lanes) -> list[list[int]]:
        """Return the lanes of each model."""
        members: list[list[int]] = [[] for _ in self.params]
        for kind in lanes.kinds:
            members[kind.model] = kind.lanes
        return members

    def active(self, present: Sequence[int]) -> tuple[int, ...]:
        """Return the models to trace for the models of some kinds.

        They are the same models, or a single one and its twin.
        """
        if len(present) == 1:
            return present[0], self.twin(present[0])
        return tuple(present)

    def lists(self, active: Iterable[int]) -> list[list[torch.Tensor]]:
        """Return the parameters of some models, group by group."""
        lists: list[list[torch.Tensor]] = [[] for _ in range(self.n_groups)]
        for number in active:
            lists[self.groups[number]].append(self.params[number])
        return lists

    def states(self, active: Iterable[int]) -> dict[torch.Tensor, dict[str, Any]]:
        """Return the state of some models."""
        params = [self.params[number] for number in active]
        return {p: self.state[p] for p in params if p in self.state}

    def lanes(
        self, optimizer: Any, active: Sequence[int]
    ) -> tuple[Lanes, dict[int, int]]:
        """Return some models as lanes of an optimizer, and the lane of each model."""
        groups = [
            {**group, "params": params}
            for group, params in zip(
                optimizer.param_groups, self.lists(active), strict=True
            )
        ]
        view = types.SimpleNamespace(param_groups=groups, state=self.states(active))
        lanes = Lanes(view, self.ignore_sizes, self.counters)
        index = {id(p): i for i, p in enumerate(lanes.params)}
        return lanes, {number: index[id(self.params[number])] for number in active}

    def renew(self, lanes: Lanes) -> None:
        """Copy zero-dimensional state from the first lane of each kind to its model."""
        for kind in lanes.kinds:
            state = self.state.get(self.params[kind.model], {})
            lane_state = lanes.states[kind.lanes[0]] or {}
            for key in kind.tensors:
                if not state[key].dim():
                    with torch.no_grad():
                        state[key].copy_(lane_state[key])

    def layouts(
        self, members: Sequence[Sequence[int]], lanes: Lanes
    ) -> dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]]:
        """Return shapes and strides for each model whose lanes differ in size.

        The model's layout comes first, then those of its `members`.
        """
        layouts = {}
        for model, members_of in enumerate(members):
            every = [self.params[model], *(lanes.params[i] for i in members_of)]
            if len({p.shape for p in every}) > 1:
                layouts[model] = [(tuple(p.shape), p.stride()) for p in every]
        return layouts

    def roles(self) -> dict[int, tuple[int, Role]]:
        """Return the number of its model, and its role, by id of each tensor."""
        roles: dict[int, tuple[int, Role]] = {}
        for number, p in enumerate(self.params):
            roles[id(p)] = number, (PARAM, "")
            if p.grad is not None:
                roles[id(p.grad)] = number, (GRAD, "")
            for key, value in self.state.get(p, {}).items():
                if isinstance(value, torch.Tensor):
                    roles[id(value)] = number, ("state", key)
            for c, value in enumerate(self.beside[number]):
                roles[id(value)] = number, (BESIDE, str(c))
        return roles

    def packed(self, number: int) -> tuple[Packed, Packed]:
        """Return the packed tensors of a model, and the unpacked, without memory."""
        p = self.params[number]
        if self.packing is None:
            return {}, {}
        state = self.state.get(p, {})
        return self.packing.of(p, state), self.packing.unpacked(p, state)

    def fill(self) -> bool:
        """Give the models' tensors memory, filled with zeros, until `empty` is called.

        A trace or a capture needs it. Returns False if they have memory already.
        """
        if self.filled:
            return False
        self.filled = True
        compat.take_for_symbols(frozenset(self.counted))
        for t in self._every():
            storage = t.untyped_storage()
            if not storage.nbytes():
                storage.resize_(t.itemsize * reach_of(t.shape, t.stride()))
                storage.fill_(0)  # type: ignore[attr-defined]
        return True

    def empty(self) -> None:
        """Free the memory of the models' tensors, except zero-dimensional ones."""
        self.filled = False
        compat.take_for_symbols(frozenset())
        for t in self._every():
            _empty(t)

    def _every(self) -> Iterator[torch.Tensor]:
        for p in self.params:
            yield p
            if p.grad is not None:
                yield p.grad
        for state in self.state.values():
            yield from (v for v in state.values() if isinstance(v, torch.Tensor))
        for beside in self.beside.values():
            yield from beside


def reach_of(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements from the first of a tensor to its last."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def _empty(t: torch.Tensor) -> None:
    """Free a tensor's memory, unless it is zero-dimensional."""
    if t.dim():
        t.untyped_storage().resize_(0)


def without_contents(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same layout, dtype and device, without memory.

    Returns a copy of a tensor without dimensions, or a zero where that has no memory.
    Raises LanesDiffer for a tensor that is not a leaf.
    """
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        if not t.dim():
            empty.copy_(t) if t.untyped_storage().nbytes() else empty.zero_()
    _empty(empty)
    if not t.is_leaf:
        raise LanesDiffer("a tensor of a lane is computed from other tensors")
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(empty, t.requires_grad)
    return empty.requires_grad_(t.requires_grad)
