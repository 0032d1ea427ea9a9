"""Make a double of an optimizer with some of its lanes, for rehearsals.

A double has the optimizer's class and copies of all that the optimizer holds. Its
tensors have the layout and the device of the real ones, in memory that nothing reads.
Zero-dimensional tensors of state are real copies.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..compiler.tables import lookup_effect
from ..inputs.keys import GRAD, OddValue, free_shape
from ..inputs.lanes import Lanes
from ..inputs.values import holdings, is_hooks, own_attributes

Perturb = Callable[[Any], Any]
#: The value for integers of state that may differ between lanes.
COUNT = 99


class TensorIdentity(NamedTuple):
    """The record of a tensor.

    `lane`: its lane, or -1. `name`: its name in the lane. `real`: True if it has
    contents.
    """

    lane: int
    name: Any
    real: bool


class Scratch:
    """Memory that nothing reads; each tensor in it has a different address."""

    STRIDE = 64

    def __init__(self) -> None:
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._next: dict[torch.device, int] = {}

    def make(
        self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True) if n)
        size = span * dtype.itemsize
        memory = self._memory.get(device)
        start = self._next.get(device, 0) + self.STRIDE
        if memory is None or start + size > memory.numel():
            room = size + self.STRIDE * 2**16
            memory = torch.empty(room, dtype=torch.uint8, device=device)
            self._memory[device] = memory
            start = 0
        self._next[device] = start
        tensor = torch.empty(0, dtype=dtype, device=device)
        storage = memory.untyped_storage()
        return tensor.set_(
            storage, start // dtype.itemsize, tuple(shape), tuple(stride)
        )


class Double:
    """A double of an optimizer, whose groups have only the lanes `members`."""

    def __init__(
        self, optimizer: Optimizer, lanes: Lanes, members: Sequence[int], perturb: Any
    ) -> None:
        self.scratch = Scratch()
        self.perturb = perturb
        self.known: dict[int, TensorIdentity] = {}
        self.alive: list[torch.Tensor] = []
        self.twins: dict[int, torch.Tensor] = {}  # by id of the real tensor
        self._lanes = lanes
        #: by lane: its parameter, the parameter's (address, gradient), and the
        #: parameter for comparisons of shapes or None
        self.params: dict[int, torch.Tensor] = {}
        self.places: dict[int, tuple[int, torch.Tensor | None]] = {}
        self.near: dict[int, torch.Tensor | None] = {}
        self._take(members)
        attributes = own_attributes(optimizer)
        double: Any = object.__new__(type(optimizer))
        for name in vars(optimizer):
            if is_hooks(name):
                vars(double)[name] = collections.OrderedDict()
        for name, value in attributes.items():
            vars(double)[name] = self.copy(value, name)
        inside = set(members)
        states: Any = collections.defaultdict(dict)
        for i in members:
            state = lanes.states[i]
            if state is not None:
                states[self.params[i]] = {
                    k: self.copy(COUNT if lanes.counters and type(v) is int else v, k)
                    for k, v in state.items()
                }
        double.state = states
        groups = []
        place = 0
        for params, group in zip(lanes.lists, optimizer.param_groups, strict=True):
            numbers = range(place, place + len(params))
            place += len(params)
            copy = {
                k: [self.params[i] for i in numbers if i in inside]
                if k == "params"
                else self.copy(v, f"group {k}")
                for k, v in group.items()
            }
            groups.append(copy)
        double.param_groups = groups
        self.optimizer = double

    def _take(self, members: Sequence[int]) -> None:
        """Make a twin for each tensor of some lanes."""
        lanes = self._lanes
        for (i, role), t in lanes.tensors(members).items():
            number = role[0] == "state" and t.dim() == 0
            twin = self._number(t) if number else self._hollow(t)
            self.twins[id(t)] = twin
            self.know(twin, TensorIdentity(i, role, number))
            if role[0] == GRAD:
                self.twins[id(lanes.params[i])].grad = twin
        for i in members:
            p = self.params[i] = self.twins[id(lanes.params[i])]
            self.places[i] = p.data_ptr(), p.grad
            self.near[i] = free_shape(p) if lanes.ignore_sizes else None

    @functools.cached_property
    def _lane_of(self) -> dict[int, int]:
        """Return the lane of each tensor of all lanes, by id."""
        every = self._lanes.tensors(range(len(self._lanes.params)))
        return {id(t): i for (i, _), t in every.items()}

    def _of_lane(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return the twin of a tensor of any lane, None for other tensors."""
        if id(t) in self._lane_of:
            self._take([self._lane_of[id(t)]])
        return self.twins.get(id(t))

    def know(self, t: torch.Tensor, identity: TensorIdentity) -> None:
        self.known[id(t)] = identity
        self.alive.append(t)

    def _number(self, t: torch.Tensor) -> torch.Tensor:
        copy = t.detach().clone()
        if self.perturb is not None and t.is_floating_point():
            copy.fill_(self.perturb(copy))
        return self._like(t, copy)

    def _hollow(self, t: torch.Tensor) -> torch.Tensor:
        memory = self.scratch.make(t.shape, t.stride(), t.dtype, t.device)
        return self._like(t, memory)

    @staticmethod
    def _like(t: torch.Tensor, content: torch.Tensor) -> torch.Tensor:
        if isinstance(t, torch.nn.Parameter):
            return torch.nn.Parameter(content, t.requires_grad)
        return content.requires_grad_(t.requires_grad)

    def copy(self, x: Any, name: str) -> Any:
        """Return a copy of a Python value over the double's tensors.

        `name`: the value's name, for errors. Raises OddValue.
        """
        if isinstance(x, torch.Tensor):
            twin = self.twins.get(id(x))
            if twin is None:
                twin = self._of_lane(x)
            if twin is None:
                if x.dim() or type(x) is not torch.Tensor:
                    raise OddValue(f"{name} is a tensor that belongs to no lane", x)
                twin = self.twins[id(x)] = self._number(x)
                self.know(twin, TensorIdentity(-1, ("shared", name, 0), True))
            return twin
        acts = lookup_effect(x)
        if acts:
            raise OddValue(f"{name} {acts}", x)
        if type(x) in (dict, collections.OrderedDict):
            return type(x)((k, self.copy(v, f"{name}.{k}")) for k, v in x.items())
        if type(x) is collections.defaultdict:
            twins: Any = collections.defaultdict(x.default_factory)
            twins.update((k, self.copy(v, f"{name}.{k}")) for k, v in x.items())
            return twins
        if type(x) in (list, tuple):
            return type(x)(self.copy(y, f"{name}.{i}") for i, y in enumerate(x))
        if type(x) in (float, int) and self.perturb is not None:
            return self.perturb(x)
        holdings(x, id)
        return x
