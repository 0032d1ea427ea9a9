"""All that an optimizer holds: a copy to run the step on, and what a recording is for.

`Held` walks an optimizer once, in an order that is the same at each call. `key` is all
that a recording depends on without a formula: which containers and tensors there are,
the layouts of tensors, values of any other type. `leaves` are the numbers and tensors
that a call is given.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from fuseopt.compiler.code_paths import PLAIN
from fuseopt.compiler.tables import acts_when_asked
from fuseopt.shadow.double import OUTSIDE, is_hooks
from fuseopt.shadow.keys import Unlike
from fuseopt.shadow.stand_in import stand_in, unfused

from .numbers import Refused

DICTS = (dict, collections.OrderedDict, collections.defaultdict)
TENSORS = (torch.Tensor, torch.nn.Parameter)
CONSTANTS = (
    *PLAIN,
    torch.Size,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    types.FunctionType,
    types.BuiltinFunctionType,
    type,
)


class Pair(NamedTuple):
    """A container of the optimizer, its copy, and what the copy held at first."""

    theirs: Any
    ours: Any
    before: Any


class Held:
    """What an optimizer holds now; `number(value, place)` makes the copy's numbers.

    Without `number` nothing is copied: only `key` and `leaves` are found.
    """

    def __init__(
        self, optimizer: Optimizer, number: Callable[[Any, int], Any] | None = None
    ) -> None:
        self.number = number
        self.key: list[Any] = []
        self.leaves: list[Any] = []
        self.pairs: list[Pair] = []
        self.place: dict[int, int] = {}  # of a tensor, by id
        self.functions: list[types.FunctionType] = []
        self.names: dict[int, Any] = {}  # of tensors of lanes' state, by place
        self._copies: dict[int, Any] = {}
        self._counts: dict[Any, int] = {}  # equal counters of lanes are one number
        try:
            self.itself: Any = stand_in(optimizer) if number else None
        except Unlike as error:
            raise Refused(str(error)) from error
        inside: dict[str, Any] = {}
        for name, x in vars(optimizer).items():
            if is_hooks(name):
                inside[name] = collections.OrderedDict()
            elif name not in OUTSIDE:
                inside[name] = self._walk(x, name)
        groups = self._groups(optimizer)
        state = self._walk(optimizer.state, "state", lanes=True)
        self.key.append((type(optimizer), *vars(optimizer)))
        if self.itself is None:
            return
        own = vars(self.itself)
        own.update(inside)
        own["param_groups"], own["state"] = groups, state
        before = own.copy()
        self.pairs.append(Pair(vars(optimizer), own, before))
        for k, pair in enumerate(self.pairs[:-1]):
            self.pairs[k] = pair._replace(before=pair.ours.copy())
        self.theirs = {id(pair.ours): pair.theirs for pair in self.pairs}

    def _groups(self, optimizer: Optimizer) -> Any:
        groups = self._walk(optimizer.param_groups, "param_groups")
        if self.number:
            pairs = zip(groups, optimizer.param_groups, strict=True)
            for ours, theirs in pairs:
                ours.update(unfused(theirs))
        return groups

    def _walk(self, x: Any, name: Any, lanes: bool = False) -> Any:
        kind = type(x)
        if kind is float or kind is int:
            return self._number(x, name, lanes)
        if kind in TENSORS:
            return self._tensor(x, name if lanes else None)
        if isinstance(x, CONSTANTS):
            plain = isinstance(x, PLAIN) or kind is torch.Size
            self.key.append((kind, repr(x)) if plain else id(x))
            if isinstance(x, types.BuiltinFunctionType):
                if not isinstance(x.__self__, (types.ModuleType, type, type(None))):
                    raise Refused(
                        f"{name} is a method of a {type(x.__self__).__name__}"
                    )
            if isinstance(x, types.FunctionType):
                self.functions.append(x)
            return x
        if kind not in (*DICTS, list, tuple):
            raise Refused(f"{name} is a {kind.__name__}, of which nothing is known")
        if acts_when_asked(x):
            raise Refused(f"{name} {acts_when_asked(x)}")
        known = self._copies.get(id(x))
        self.key.append((kind, id(x), len(x)))
        if known is not None:
            return known[0]
        if kind is tuple:
            items = tuple([self._walk(y, (name, i), lanes) for i, y in enumerate(x)])
            same = all(a is b for a, b in zip(items, x, strict=True))
            self._copies[id(x)] = (x if same else items,)
            return x if same else items
        ours: Any = None
        if self.number:
            ours = (
                collections.defaultdict(x.default_factory)
                if kind is collections.defaultdict
                else kind()
            )
            self.pairs.append(Pair(x, ours, None))
        self._copies[id(x)] = (ours,)
        if kind is list:
            items = [self._walk(y, (name, i), lanes) for i, y in enumerate(x)]
            if ours is not None:
                ours.extend(items)
            return ours
        for k, y in x.items():
            if type(k) in TENSORS:
                self.key.append(("key", self.place.get(id(k)), type(k)))
                if id(k) not in self.place:
                    self.key.append(id(k))
            elif isinstance(k, (*PLAIN, tuple)):
                self.key.append((type(k), repr(k)))
            else:
                raise Refused(f"{name} has a key of the type {type(k).__name__}")
            item = self._walk(y, k if lanes else (name, k), lanes)
            if ours is not None:
                ours[k] = item
        return ours

    def _number(self, x: Any, name: Any, lanes: bool) -> Any:
        if lanes:
            same = name, type(x), repr(x)
            first = self._counts.get(same)
            self.key.append((type(x), first))
            if first is not None:
                return self._copies[-1 - first] if self.number else None
            self._counts[same] = len(self.leaves)
        else:
            self.key.append(type(x))
        place = len(self.leaves)
        self.leaves.append(x)
        if self.number is None:
            return None
        ours = self.number(x, place)
        if lanes:
            self._copies[-1 - place] = ours
        return ours

    def _tensor(self, t: Any, name: Any = None) -> Any:
        if id(t) in self.place:
            self.key.append(("again", self.place[id(t)]))
            return t
        if name is not None:
            self.names[len(self.leaves)] = name
        self.place[id(t)] = len(self.leaves)
        self.leaves.append(t)
        if t.layout is not torch.strided or t.is_quantized:
            raise Refused(f"a tensor has the layout {t.layout}")
        facts = t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.is_leaf
        self.key.append((type(t), *facts, t.storage_offset(), t.is_conj(), t.is_neg()))
        if t.__dict__:
            self.key.append(tuple([(k, id(v)) for k, v in t.__dict__.items()]))
            for v in t.__dict__.values():
                if not isinstance(v, CONSTANTS):
                    raise Refused("a tensor has an attribute of which nothing is known")
        grad = t.grad if t.is_leaf else None
        if grad is None:
            self.key.append(None)
        elif type(grad) in TENSORS:
            self._tensor(grad)
        else:
            raise Refused(f"a gradient is a {type(grad).__name__}")
        return t


def kept_alive(held: Held) -> list[Any]:
    """What must outlive a recording, so that no other object has its id."""
    return [*held.leaves, *[pair.theirs for pair in held.pairs]]
