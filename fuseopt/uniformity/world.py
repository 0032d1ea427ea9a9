"""Objects that exist before the step runs: the optimizer, its groups, modules,
containers.

For numbers the analysis uses only the types, since numbers change between steps.
Constants of other types have their values. Dynamo guards the constants that the leading
lanes' step reads, and the analysis is repeated for each of its graphs.
"""

from __future__ import annotations

import collections
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.tables import lookup_effect
from .values import (
    EXACT,
    NONE,
    PLAIN,
    Data,
    Held,
    Items,
    Known,
    Level,
    Tensor,
    Unusable,
    Value,
    join,
    uniform,
)

CONTAINERS = (
    list,
    dict,
    set,
    frozenset,
    collections.OrderedDict,
    collections.defaultdict,
)
FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.ModuleType,
    type,
    staticmethod,
    classmethod,
    property,
)
_HOOKS = ("__getattribute__", "__getattr__", "__setattr__", "__delattr__")
_RESERVED = ("state", "param_groups")


class Unknown(Exception):
    """An optimizer cannot be analysed; the message gives the reason."""


#: The largest number of objects of a container that are inspected, without plain data.
MANY = 64


#: Prefixes of the names of objects that the optimizer holds.
OF_OPTIMIZER = ("self.", "group[")


class World:
    """Objects that exist before the step of an optimizer runs. See the module.

    `known`: tensors of lanes besides those that the optimizer holds now. `written`: the
    places that the step may change, whose former values are therefore uncertain.
    `fields`: the values that state and written places may have. Raises Unknown.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        known: Iterable[torch.Tensor] = (),
        counters: bool = False,
    ) -> None:
        self.optimizer = optimizer
        #: True if alike lanes may differ in the integers in their state
        self.counters = counters
        self.kind = kind = type(optimizer)
        for c in kind.__mro__[:-1]:
            for name in _HOOKS:
                if name in vars(c):
                    raise Unknown(f"{c.__name__} defines {name}")
            if any(name in vars(c) for name in _RESERVED):
                raise Unknown(f"{c.__name__} defines `state` or `param_groups` itself")
        state = optimizer.state
        if type(state) not in (dict, collections.defaultdict):
            raise Unknown(f"its state is a {type(state).__name__}")
        if getattr(state, "default_factory", None) not in (None, dict):
            raise Unknown("its state has its own default factory")
        self.groups: list[dict[str, Any]] = []
        self.lanes: set[int] = set()
        tensors: list[Any] = []
        for group in optimizer.param_groups:
            if type(group) is not dict or type(group["params"]) is not list:
                raise Unknown("its groups are not dicts with lists")
            self.groups.append(dict(group))
            tensors += group["params"]
        #: True if all parameters have one device and one dtype
        self.single = len({(p.device, p.dtype) for p in tensors}) == 1
        for p in tensors:
            if vars(p) and any(hasattr(torch.Tensor, name) for name in vars(p)):
                raise Unknown("a parameter has attributes that hide a tensor's own")
        tensors += [p.grad for p in tensors if p.grad is not None]
        self.fields: dict[Any, Value] = {}
        for state in optimizer.state.values():
            if type(state) is not dict:
                raise Unknown("the state of a parameter is not a dict")
            acts = lookup_effect(state)
            if acts:
                raise Unknown(f"the state of a parameter {acts}")
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                self.field(key, self._state_value(value))
        # while the leading lanes are traced, the groups hold no others
        tensors += known
        self.lanes.update(map(id, tensors))
        self.written: set[Any] = set()
        self.changed = False
        self._numbers: dict[int, int] = {}
        #: numbers of containers outside of the optimizer. A rehearsal runs on a double
        #: of the optimizer alone, so no step may change them
        self.foreign: set[int] = set()
        self._objects: list[Any] = []
        #: the ids of tensors that were met and belong to no lane
        self.shared: set[int] = set()

    # ---------------------------------------------------------------- lanes

    def of_lanes(self) -> Any:
        """Return the facts about lanes that the analysis reads, for comparison.

        Call this on a world in which no step was analysed.
        """
        return self.single, self.counters, dict(self.fields)

    def _state_value(self, value: Any) -> Value:
        if isinstance(value, torch.Tensor):
            return Tensor()
        if type(value) is int and self.counters:
            return Data(Level.NUMBER, frozenset({int}))
        if isinstance(value, PLAIN):
            return Data(Level.KIND, frozenset({type(value)}))
        return Unusable("the state of a lane is neither a tensor nor a number")

    def field(self, key: Any, value: Value) -> None:
        """Record a value that the state of lanes may hold under a key."""
        before = self.fields.get(key)
        now = value if before is None else join(before, value, Level.KIND)
        if now != before:
            self.fields[key] = now
            self.changed = True

    def write(self, what: Any) -> None:
        """Record a place that the step changes."""
        if what not in self.written:
            self.written.add(what)
            self.changed = True

    # ---------------------------------------------------------------- held objects

    def hold(self, x: Any, name: str) -> Held:
        number = self._numbers.get(id(x))
        if number is None:
            number = self._numbers[id(x)] = len(self._objects)
            self._objects.append(x)
        if not name.startswith(OF_OPTIMIZER) and number not in self.foreign:
            self.foreign.add(number)
            self.changed |= number in self.written
        return Held(number, name)

    def object(self, container: Held) -> Any:
        return self._objects[container.number]

    def value(self, x: Any, name: str) -> Value:
        """Return the abstract value of an existing object; `name` is for messages."""
        if x is True or x is False or x is None:
            return Known(x)
        # user code (`__class__`) may decide the result of `isinstance`
        kind = type(x)
        if compat.is_numpy_float(x) and compat.may_follow_numpy():
            # a trace ends where the step uses it in any other way
            return uniform(float)
        if compat.acts_otherwise(x):
            return Unusable(
                f"{name} is a {kind.__name__} that defines its own operators"
            )
        if kind in (int, float, complex):
            return uniform(kind)
        if issubclass(kind, EXACT):
            return Known(x)
        if kind is tuple:
            if len(x) > 64:
                return self.hold(x, name)
            return Items(tuple(self.value(y, f"{name}[{i}]") for i, y in enumerate(x)))
        if issubclass(kind, PLAIN):
            return uniform(kind)
        if issubclass(kind, torch.Tensor):
            if id(x) in self.lanes:
                return Unusable(f"{name} is a tensor of one lane")
            self.shared.add(id(x))
            return Tensor(shared=True)
        if kind in CONTAINERS:
            acts = lookup_effect(x)
            return Unusable(f"{name} {acts}") if acts else self.hold(x, name)
        if issubclass(kind, FUNCTIONS) or callable(x):
            return Known(x)
        return Unusable(f"{name} is a {kind.__name__}, an unsupported type")

    def all_of(self, values: Any, name: str, level: Level) -> Value:
        """Return the join of the values of objects; `level`: that of the choice."""
        result: Value | None = None
        for number, x in enumerate(values):
            if number >= MANY and not isinstance(x, PLAIN):
                return Unusable(f"{name} holds more than {MANY} objects")
            value = self.value(x, f"an item of {name}")
            if isinstance(value, Unusable):
                return value
            # the choice among the objects depends on data of `level`
            if isinstance(value, Known) and level != Level.UNIFORM:
                value = join(value, Data(level, frozenset({type(x)})), level)
            elif isinstance(value, Data):
                value = Data(max(value.level, level), value.types)
            elif isinstance(value, Tensor) and level != Level.UNIFORM:
                value = Tensor()
            result = value if result is None else join(result, value, level)
        return Data(level, frozenset({NONE})) if result is None else result
