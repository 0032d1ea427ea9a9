"""An optimizer, some of its lanes -> its double, whose tensors have no contents.

A double has the optimizer's class and copies of all that the optimizer holds. Its
tensors have the layout and the device of the real ones, in memory that nobody reads;
numbers without dimensions are real copies.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from ..compiler.code_paths import PLAIN
from .lanes import GRAD, Lanes, Unlike, free_shape

#: Attributes that the step's own function does not see.
OUTSIDE = frozenset({"state", "param_groups", "step"})
Perturb = Callable[[Any], Any]
#: What stands for integers in which lanes may differ.
COUNT = 99


class Known(NamedTuple):
    """What is known of a tensor: the lane whose it is, -1 for none; its name there;
    whether its contents are known.
    """

    lane: int
    name: Any
    real: bool


def is_hooks(name: str) -> bool:
    """Is this attribute what torch keeps hooks in?"""
    return name.endswith("_hooks")


def holdings(
    x: Any, tensor: Callable[[torch.Tensor], Any], seen: frozenset[int] = frozenset()
) -> Any:
    """All that some Python state holds, as data that can be compared.

    `tensor` says what stands for a tensor. Raises Unlike for what is not plain data.
    """
    if isinstance(x, torch.Tensor):
        return tensor(x)
    if isinstance(x, PLAIN):
        return type(x), repr(x)
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType, type)):
        return id(x)
    if id(x) in seen:
        raise Unlike("its state holds itself")
    seen |= {id(x)}
    if type(x) in (dict, collections.OrderedDict, collections.defaultdict):
        return type(x), [
            (holdings(k, tensor, seen), holdings(v, tensor, seen)) for k, v in x.items()
        ]
    if type(x) in (list, tuple, torch.Size):
        return type(x), [holdings(y, tensor, seen) for y in x]
    if isinstance(x, weakref.ref):
        return id(x)
    raise Unlike(f"it holds a {type(x).__name__}, of which nothing is known")


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What a step may see of an optimizer beside its lanes."""
    return {
        k: v for k, v in vars(optimizer).items() if k not in OUTSIDE and not is_hooks(k)
    }


class Scratch:
    """Memory that nobody reads, in which every tensor has a place of its own."""

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
        made = torch.empty(0, dtype=dtype, device=device)
        storage = memory.untyped_storage()
        return made.set_(storage, start // dtype.itemsize, tuple(shape), tuple(stride))


class Double:
    """A double of an optimizer, some of whose lanes its groups hold."""

    def __init__(
        self, optimizer: Optimizer, lanes: Lanes, members: Sequence[int], perturb: Any
    ) -> None:
        self.scratch = Scratch()
        self.perturb = perturb
        self.known: dict[int, Known] = {}
        self.alive: list[torch.Tensor] = []
        self.twins: dict[int, torch.Tensor] = {}  # by id of the real tensor
        self._lanes = lanes
        #: by lane: its parameter, where that lies and its gradient, and the parameter
        #: that tensors of its sizes are described by
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
        for own, group in zip(lanes.lists, optimizer.param_groups, strict=True):
            numbers = range(place, place + len(own))
            place += len(own)
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
        """Have a twin for each tensor of some lanes."""
        lanes = self._lanes
        for (i, role), t in lanes.tensors(members).items():
            number = role[0] == "state" and t.dim() == 0
            twin = self._number(t) if number else self._hollow(t)
            self.twins[id(t)] = twin
            self.know(twin, Known(i, role, number))
            if role[0] == GRAD:
                self.twins[id(lanes.params[i])].grad = twin
        for i in members:
            p = self.params[i] = self.twins[id(lanes.params[i])]
            self.places[i] = p.data_ptr(), p.grad
            self.near[i] = free_shape(p) if lanes.loose else None

    @functools.cached_property
    def _lane_of(self) -> dict[int, int]:
        """By id of a lane's tensor, which of all lanes it is."""
        every = self._lanes.tensors(range(len(self._lanes.params)))
        return {id(t): i for (i, _), t in every.items()}

    def _of_lane(self, t: torch.Tensor) -> torch.Tensor | None:
        """What stands for a tensor of a lane that is not run; None for any other."""
        if id(t) in self._lane_of:
            self._take([self._lane_of[id(t)]])
        return self.twins.get(id(t))

    def know(self, t: torch.Tensor, known: Known) -> None:
        self.known[id(t)] = known
        self.alive.append(t)

    def _number(self, t: torch.Tensor) -> torch.Tensor:
        made = t.detach().clone()
        if self.perturb is not None and t.is_floating_point():
            made.fill_(self.perturb(made))
        return self._like(t, made)

    def _hollow(self, t: torch.Tensor) -> torch.Tensor:
        made = self.scratch.make(t.shape, t.stride(), t.dtype, t.device)
        return self._like(t, made)

    @staticmethod
    def _like(t: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        if isinstance(t, torch.nn.Parameter):
            return torch.nn.Parameter(made, t.requires_grad)
        return made.requires_grad_(t.requires_grad)

    def copy(self, x: Any, name: str) -> Any:
        """A copy of Python state over the double's tensors."""
        if isinstance(x, torch.Tensor):
            twin = self.twins.get(id(x))
            if twin is None:
                twin = self._of_lane(x)
            if twin is None:
                if x.dim() or type(x) is not torch.Tensor:
                    raise Unlike(f"{name} is a tensor that belongs to no lane")
                twin = self.twins[id(x)] = self._number(x)
                self.know(twin, Known(-1, ("shared", name, 0), True))
            return twin
        if type(x) in (dict, collections.OrderedDict):
            return type(x)((k, self.copy(v, f"{name}.{k}")) for k, v in x.items())
        if type(x) is collections.defaultdict:
            made: Any = collections.defaultdict(x.default_factory)
            made.update((k, self.copy(v, f"{name}.{k}")) for k, v in x.items())
            return made
        if type(x) in (list, tuple):
            return type(x)(self.copy(y, f"{name}.{i}") for i, y in enumerate(x))
        if type(x) in (float, int) and self.perturb is not None:
            return self.perturb(x)
        holdings(x, id)
        return x
