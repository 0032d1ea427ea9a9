"""Rules for queries of classes: `isinstance`, `type`, `issubclass`, `callable`."""

from __future__ import annotations

import ast
import builtins
import numbers

import torch
import torch.optim.optimizer as torch_optimizer

from .functions import Args, Keywords, rule
from .machine import Machine, usable
from .memory import List
from .values import (
    Data,
    First,
    Group,
    Held,
    Items,
    Known,
    Level,
    Optimizer,
    Ref,
    State,
    Tensor,
    Value,
)

#: Classes for which `isinstance` agrees for a DTensor and its local tensor.
_SAME_OF_ALL = frozenset(
    {torch.Tensor, torch.nn.Parameter, bool, int, float, complex, str, type(None)}
    | {list, tuple, dict, set, numbers.Number, numbers.Real}
)


@rule(builtins.isinstance)
def is_instance(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    """`isinstance(value, kinds)`."""
    value, kinds = usable(machine, args[0], node), _classes(machine, args[1], node)
    if isinstance(value, Known):
        return Known(isinstance(value.value, kinds))
    if isinstance(value, Data):
        return _among(value, kinds)
    if isinstance(value, (Tensor, First)) and not _SAME_OF_ALL.issuperset(kinds):
        machine.classes = True
    if isinstance(value, Tensor):
        if value.none or value.plain or value.number:
            return Data(Level.KIND, frozenset({bool}))
        if torch.Tensor in kinds:
            return Known(True)
        return Data(Level.UNIFORM if value.shared else Level.KIND, frozenset({bool}))
    if isinstance(value, First):
        return Data(Level.UNIFORM, frozenset({bool}))
    python = _python_type(machine, value)
    if python is None:
        raise machine.refusal("it reads the class of an unknown value", node)
    return Known(any(issubclass(python, k) for k in kinds))


def _classes(machine: Machine, value: Value, node: ast.AST) -> tuple[type, ...]:
    if isinstance(value, Known) and isinstance(value.value, type):
        if type(value.value).__instancecheck__ is type.__instancecheck__ or (
            value.value.__module__.partition(".")[0]
            in ("torch", "collections", "typing", "numbers", "builtins")
        ):
            return (value.value,)
    if isinstance(value, Items):
        return tuple(c for x in value.items for c in _classes(machine, x, node))
    import types

    if isinstance(value, Known) and isinstance(value.value, types.UnionType):
        return tuple(
            c for x in value.value.__args__ for c in _classes(machine, Known(x), node)
        )
    raise machine.refusal("it tests for an unknown class", node)


def _among(value: Data, kinds: tuple[type, ...]) -> Value:
    if value.types is not None:
        inside = [any(issubclass(k, c) for c in kinds) for k in value.types]
        if all(inside):
            return Known(True)
        if not any(inside):
            return Known(False)
    return Data(value.level, frozenset({bool}))


def _python_type(machine: Machine, value: Value) -> type | None:
    if isinstance(value, Items):
        return tuple
    if isinstance(value, Ref):
        return list if isinstance(machine.now.heap[value.number], List) else dict
    if isinstance(value, (Group, State)):
        return dict
    if isinstance(value, Held):
        return type(machine.world.object(value))
    if isinstance(value, Optimizer):
        kind: type = machine.world.kind
        return kind
    return None


def _by_default(machine: Machine) -> bool:
    """Is the caller torch's choice between its foreach and its for-loop steps?"""
    return machine.frames[-1].source.code is _CHOICE


_CHOICE = getattr(
    getattr(torch_optimizer, "_default_to_fused_or_foreach", None), "__code__", None
)


@rule(type)
def _type(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    value = usable(machine, args[0], node)
    if len(args) != 1:
        raise machine.refusal("it makes a class", node)
    if isinstance(value, Optimizer):
        return Known(machine.world.kind)
    if isinstance(value, Tensor):
        machine.classes = machine.classes or not _by_default(machine)
        return Data(Level.KIND, frozenset({type(None)}))
    if isinstance(value, Known):
        return Known(type(value.value))
    python = _python_type(machine, value)
    if python is None:
        raise machine.refusal("it reads the class of an unknown value", node)
    return Known(python)


@rule(builtins.issubclass)
def _issubclass(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    a, b = args
    if isinstance(a, Known) and isinstance(b, Known):
        return Known(issubclass(a.value, b.value))
    raise machine.refusal("it tests for an unknown class", node)


@rule(builtins.callable)
def _callable(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if isinstance(args[0], Known):
        return Known(callable(args[0].value))
    if isinstance(args[0], (Data, Tensor, Items, Ref)):
        return Known(False)
    raise machine.refusal("it tests an unknown value", node)
