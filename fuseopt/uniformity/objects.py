"""Attributes: of the optimizer, of modules and classes, of plain data."""

from __future__ import annotations

import ast
import inspect
import types
from typing import Any

from . import tensors
from .machine import Machine, usable
from .values import (
    PLAIN,
    Bound,
    Data,
    First,
    Group,
    Grouped,
    Groups,
    Held,
    Items,
    Known,
    Level,
    Many,
    Method,
    Optimizer,
    Ref,
    State,
    States,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
    uniform,
)

_MISSING = object()
_METHODS = (Ref, Held, Group, State, States, Grouped, Items, Many, Groups)


def attribute(machine: Machine, value: Value, name: str, node: ast.AST) -> Value:
    """Return an attribute of a value. Refuses attributes that may not be read."""
    usable(machine, value, node)
    if isinstance(value, (Tensor, First)):
        return tensors.attribute(machine, value, name, node)
    if isinstance(value, Optimizer):
        value_of_name = of_optimizer(machine, value, name, node)
        if value_of_name is None:
            raise machine.refusal(f"the optimizer has no attribute {name}", node)
        return value_of_name
    if isinstance(value, Known):
        return _of_known(machine, value.value, name, node)
    if isinstance(value, Data):
        return _of_data(machine, value, name, node)
    if isinstance(value, Items) and name in ("values", "indices") and value.items:
        # a named tuple that torch.max or the like returns
        return value.items[0 if name == "values" else 1]
    if isinstance(value, _METHODS):
        return Method(value, name)
    raise machine.refusal(
        f"it reads {name} of a value that differs between lanes", node
    )


# ---------------------------------------------------------------- the optimizer


def of_optimizer(
    machine: Machine, value: Optimizer, name: str, node: ast.AST
) -> Value | None:
    """Return an attribute of the optimizer; None if it has none of that name."""
    world = machine.world
    if value.past is None:
        if name == "state":
            return States()
        if name == "param_groups":
            return Groups()
        if name == "__class__":
            return Known(world.kind)
    order = list(world.kind.__mro__)
    if value.past is not None:
        order = order[order.index(value.past) + 1 :]
    attribute: Any = _MISSING
    for c in order:
        if name in vars(c):
            attribute = vars(c)[name]
            break
    if isinstance(attribute, property):
        if not isinstance(attribute.fget, types.FunctionType):
            raise machine.refusal(f"{name} is a property without a function", node)
        return machine.call(machine, Known(attribute.fget), [Optimizer()], {}, node)
    if attribute is not _MISSING and not isinstance(attribute, types.FunctionType):
        kind = type(attribute)
        if hasattr(kind, "__set__") or (
            hasattr(kind, "__get__") and kind not in (staticmethod, classmethod)
        ):
            raise machine.refusal(f"{name} is a {kind.__name__}", node)
    attributes = vars(world.optimizer)
    if value.past is None and name in attributes:
        if ("attribute", name) in world.written:
            title = f"self.{name}"
            return _written(machine, ("attribute", name), attributes[name], title)
        return usable_value(machine, attributes[name], f"self.{name}", node)
    if attribute is _MISSING:
        if ("attribute", name) in world.written:
            return _written(machine, ("attribute", name), _MISSING, name)
        return None
    if isinstance(attribute, staticmethod):
        return Known(attribute.__func__)
    if isinstance(attribute, classmethod):
        return Bound(Known(attribute.__func__), Known(world.kind))
    if isinstance(attribute, types.FunctionType):
        return Bound(Known(attribute), Optimizer())
    if ("attribute", name) in world.written:
        return _written(machine, ("attribute", name), attribute, name)
    return usable_value(machine, attribute, f"{world.kind.__name__}.{name}", node)


def _written(machine: Machine, place: Any, value: Any, name: str) -> Value:
    """Return the value of a place that the step changes: its former or a new value."""
    result: Value = machine.world.fields.get(place, uniform())
    if value is not _MISSING:
        from .values import join

        result = join(result, machine.world.value(value, name), Level.UNIFORM)
        if isinstance(result, Known) and isinstance(result.value, PLAIN):
            result = Data(Level.UNIFORM, frozenset({type(result.value)}))
    return result


def usable_value(machine: Machine, x: Any, name: str, node: ast.AST) -> Value:
    """Return the abstract value of an object that exists. Refuses unusable ones."""
    return usable(machine, machine.world.value(x, name), node)


def write(machine: Machine, place: Any, value: Value, node: ast.AST) -> None:
    """Change an attribute, or an item of a group or of a container, for all lanes.

    Refuses values that differ between lanes, and writes within a loop over lanes.
    """
    usable(machine, value, node)
    if machine.lane is not None:
        raise machine.refusal(
            "a loop over lanes changes an object that belongs to no lane", node
        )
    if place in machine.world.foreign:
        raise machine.refusal("it changes an object outside of the optimizer", node)
    plain = level_of(value) == Level.UNIFORM or (
        isinstance(value, Tensor) and value.shared and not value.number
    )
    if isinstance(value, Items):
        plain = all(level_of(x) == Level.UNIFORM for x in value.items)
    if isinstance(value, Known) and not isinstance(value.value, PLAIN):
        plain = False
    if not plain:
        raise machine.refusal("it keeps a value that differs between lanes", node)
    machine.world.write(place)
    if isinstance(value, Known):
        value = Data(Level.UNIFORM, frozenset({type(value.value)}))
    elif isinstance(value, Items):
        value = uniform(tuple)
    fields = machine.world.fields
    before = fields.get(place)

    now = value if before is None else join(before, value, Level.UNIFORM)
    if now != before:
        fields[place] = now
        machine.world.changed = True


# ---------------------------------------------------------------- existing objects


def _of_known(machine: Machine, x: Any, name: str, node: ast.AST) -> Value:
    if isinstance(x, types.ModuleType):
        return _of_module(machine, x, name, node)
    if isinstance(x, type):
        return _of_class(machine, x, name, node)
    if isinstance(x, PLAIN):
        return _of_data(machine, Known(x), name, node)
    if isinstance(x, types.FunctionType) and name in vars(x):
        return usable_value(machine, vars(x)[name], f"{x.__name__}.{name}", node)
    if name in ("__name__", "__qualname__", "__doc__", "__module__"):
        return uniform(str)
    if type(x).__module__.startswith("torch") and not callable(x):
        static = inspect.getattr_static(x, name, _MISSING)
        if isinstance(static, PLAIN):
            return machine.world.value(static, name)
    raise machine.refusal(f"it reads {name} of a {type(x).__name__}", node)


def _of_module(
    machine: Machine, x: types.ModuleType, name: str, node: ast.AST
) -> Value:
    """Return an attribute of a module, without running any user code."""
    title = str(vars(x).get("__name__"))
    if type(x) is types.ModuleType and name in vars(x):
        return usable_value(machine, vars(x)[name], f"{title}.{name}", node)
    if title.partition(".")[0] != "torch" or not hasattr(x, name):
        raise machine.refusal(f"the dict of the module {title} has no {name}", node)
    return usable_value(machine, getattr(x, name), f"{title}.{name}", node)


def has(machine: Machine, x: Any, name: str, node: ast.AST) -> bool:
    """Does an object have an attribute? Refuses objects whose code computes it."""
    static = inspect.getattr_static(x, name, _MISSING)
    if static is _MISSING and hasattr(type(x), "__getattr__"):
        raise machine.refusal(
            f"a {type(x).__name__} computes its attributes in code", node
        )
    if isinstance(x, types.ModuleType) and "__getattr__" in vars(x):
        raise machine.refusal(
            f"{vars(x)['__name__']} computes its attributes in code", node
        )
    return static is not _MISSING


def _of_class(machine: Machine, c: type, name: str, node: ast.AST) -> Value:
    if name in ("__name__", "__qualname__", "__module__"):
        return uniform(str)
    if type(c).__module__ not in ("builtins", "abc", "torch", "torch._C", "enum"):
        if type(c) is not type(machine.world.kind):
            raise machine.refusal(f"{c.__name__} has a metaclass", node)
    for owner in c.__mro__:
        if name in vars(owner):
            static = vars(owner)[name]
            if isinstance(static, staticmethod):
                return Known(static.__func__)
            if isinstance(static, classmethod):
                return Bound(Known(static.__func__), Known(c))
            if isinstance(static, property):
                return Known(static)
            return usable_value(machine, static, f"{c.__name__}.{name}", node)
    raise machine.refusal(f"{c.__name__} does not define {name}", node)


def _of_data(machine: Machine, value: Value, name: str, node: ast.AST) -> Value:
    level, kinds = level_of(value), types_of(value)
    assert level is not None
    if level == Level.NUMBER:
        if name in ("is_integer", "conjugate"):
            return Method(value, name)
        raise machine.refusal(f"it reads {name} of a number read from a lane", node)
    if kinds is None or not all(issubclass(k, PLAIN) for k in kinds):
        raise machine.refusal(
            f"it reads {name} of an object that may not be plain data", node
        )
    if name.startswith("__"):
        raise machine.refusal(f"it reads {name}", node)
    methods = [getattr(k, name, None) for k in kinds if k is not type(None)]
    if any(callable(m) for m in methods):
        return Method(value, name)
    answers = {
        "type": str,
        "index": int,
        "itemsize": int,
        "is_floating_point": bool,
        "is_complex": bool,
        "is_signed": bool,
        "eps": float,
        "tiny": float,
        "smallest_normal": float,
        "bits": int,
        "real": float,
        "imag": float,
        "max": float,
        "min": float,
        "resolution": float,
    }
    if isinstance(value, Known) and hasattr(value.value, name):
        return machine.world.value(getattr(value.value, name), name)
    return Data(level, frozenset({answers[name]}) if name in answers else None)
