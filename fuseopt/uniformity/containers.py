"""Items that a step reads: of lists, dicts and tuples, of groups and states."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from .machine import Machine, usable
from .memory import Dict, List
from .sequences import Base
from .values import (
    PLAIN,
    Data,
    First,
    Group,
    Groups,
    Held,
    Index,
    Items,
    Known,
    Level,
    Many,
    Ref,
    Sequence,
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


def key_level(machine: Machine, key: Value, node: ast.AST) -> Level:
    """Return the level of a key. Refuses numbers read from lanes, and objects."""
    if isinstance(key, Items):
        return max((key_level(machine, x, node) for x in key.items), default=Level(0))
    if isinstance(key, Index):
        raise machine.refusal("it uses the position of a lane", node)
    if isinstance(key, Tensor):
        raise machine.refusal("it looks up a tensor of a lane", node)
    level = level_of(key)
    if level is None or level == Level.NUMBER:
        raise machine.refusal("it looks up a value that differs between lanes", node)
    if isinstance(key, Known) and not isinstance(key.value, PLAIN):
        raise machine.refusal("it looks up an object", node)
    return level


def is_slice(key: Value) -> bool:
    """Is it a slice rather than an index?"""
    types_ = types_of(key)
    return types_ is not None and slice in types_


def item(machine: Machine, value: Value, key: Value, node: ast.AST) -> Value:
    """Evaluate `value[key]`."""
    usable(machine, value, node)
    usable(machine, key, node)
    if isinstance(value, Known) and not isinstance(value.value, PLAIN):
        if isinstance(value.value, type) or type(value.value).__module__ == "typing":
            return Known(object)  # a subscripted type, as an argument of typing.cast
    if isinstance(value, States):
        if isinstance(key, Tensor) and key.role == "param":
            return State()
        raise machine.refusal(
            "it reads state of something other than the lane's parameter", node
        )
    if isinstance(value, State):
        return state_item(machine, key, node)
    if isinstance(value, Tensor):
        from .tensors import Operands

        operands = Operands(machine, node)
        operands.take(value)
        operands.take(key)
        if operands.number and not value.number:
            raise machine.refusal("it slices by a number read from a lane", node)
        return Tensor(shared=operands.shared, foreign=operands.foreign)
    if isinstance(value, Group):
        return group_item(machine, value, key, node)
    if isinstance(value, Groups):
        if isinstance(key, Known) and type(key.value) is int:
            if -len(machine.world.groups) <= key.value < len(machine.world.groups):
                return Group(key.value % len(machine.world.groups))
        raise machine.refusal("it reads a group by an unknown index", node)
    if isinstance(value, Ref):
        return ref_item(machine, value, key, node)
    if isinstance(value, Sequence):
        if isinstance(key, Index) and key.lanes == value.lanes:
            return usable(machine, value.item, node)
        if key == Known(0):
            return first_of(machine, value.item, node)
        raise machine.refusal("two lists may have different lanes", node)
    if isinstance(value, Held):
        return held_item(machine, value, key, node)
    if isinstance(value, Items):
        return _tuple_item(machine, value, key, node)
    level = level_of(value)
    if level is not None and level != Level.NUMBER:
        return Data(max(level, key_level(machine, key, node)), _part_types(value, key))
    if isinstance(value, Many):
        level = key_level(machine, key, node)
        if is_slice(key):
            return Many(value.item, max(level, value.level))
        return join(value.item, value.item, level)
    raise machine.refusal(
        "it reads an item of a value that differs between lanes", node
    )


def _part_types(value: Value, key: Value) -> frozenset[type] | None:

    types = types_of(value)
    if types == frozenset({torch.Size}):
        return types if is_slice(key) else frozenset({int})
    return types if types == frozenset({str}) else None


def _tuple_item(machine: Machine, value: Items, key: Value, node: ast.AST) -> Value:
    if isinstance(key, Known) and type(key.value) is int:
        if -len(value.items) <= key.value < len(value.items):
            return usable(machine, value.items[key.value], node)
        raise machine.refusal("a tuple has fewer items", node)
    if isinstance(key, Known) and isinstance(key.value, slice):
        return Items(value.items[key.value])
    level = key_level(machine, key, node)
    if is_slice(key) or not value.items:
        raise machine.refusal("it slices an unknown tuple", node)
    result = value.items[0]
    for x in value.items[1:]:
        result = join(result, x, level)
    if isinstance(result, (Known, Data)):
        result = join(result, Data(level, types_of(result)), level)
    return usable(machine, result, node)


def ref_item(machine: Machine, ref: Ref, key: Value, node: ast.AST) -> Value:
    """Evaluate `ref[key]`, where the step has created the list or dict `ref`."""
    container = machine.now.heap[ref.number]
    if isinstance(container, List) and container.added is not None:
        if isinstance(key, Known) and key.value == -1 and machine.lane is not None:
            if not container.added.branches:
                return usable(machine, container.added.item, node)
    container = machine.container(ref, node)
    if isinstance(container, Dict):
        if isinstance(key, Known):
            value = container.get(key.value)
            if value is not None:
                return usable(machine, value, node)
        level = key_level(machine, key, node)
        values = [v for _, v in container.items]
        if container.other is not None:
            values.append(container.other)
        if not values:
            raise machine.refusal("a dict has no such item", node)
        result = values[0]
        for x in values[1:]:
            result = join(result, x, level)
        if isinstance(result, (Known, Data)):
            result = join(result, Data(level, types_of(result)), level)
        return usable(machine, result, node)
    if container.lanes is not None:
        if isinstance(key, Index):
            if key.lanes != container.lanes:
                raise machine.refusal("two lists may have different lanes", node)
            assert container.item is not None
            return usable(machine, container.item, node)
        if key == Known(0):
            return first_of(machine, container.item, node)
        if isinstance(key, Known) and key.value == slice(None):
            return machine.new(replace(container, added=None))
        raise machine.refusal("it indexes lanes by position", node)
    if isinstance(key, Known) and container.items is not None:
        if type(key.value) is int or isinstance(key.value, slice):
            value = _tuple_item(machine, Items(container.items), key, node)
            if isinstance(value, Items) and isinstance(key.value, slice):
                return machine.list_of(*value.items)
            return value
    level = key_level(machine, key, node)
    if container.items is not None and not is_slice(key):
        return _tuple_item(machine, Items(container.items), key, node)
    if container.items is not None or container.many is None:
        raise machine.refusal("it slices an unknown list", node)
    if is_slice(key):
        return machine.new(List(None, container.many, max(level, container.level)))
    return usable(machine, join(container.many, container.many, level), node)


def first_of(machine: Machine, value: Value | None, node: ast.AST) -> Value:
    """Return the item of the first lane of a sequence.

    The first lane leads its kind, so its plain data and metadata are uniform. This
    requires that the first lanes of kinds have the order of their models.
    """
    machine.firsts = True
    if isinstance(value, Tensor):
        return First()
    level = None if value is None else level_of(value)
    if value is not None and level is not None and level != Level.NUMBER:
        return Data(Level.UNIFORM, types_of(value))
    raise machine.refusal("it indexes lanes by position", node)


def held_item(machine: Machine, container: Held, key: Value, node: ast.AST) -> Value:
    """Evaluate `container[key]`, where the container existed before the step."""
    world = machine.world
    level = key_level(machine, key, node)
    x = world.object(container)
    if container.number in world.written:
        return Data(level)
    makes = getattr(x, "default_factory", None) is not None
    if isinstance(key, Known) and not is_slice(key):
        try:
            # a defaultdict would make the item, even if the step never gets there
            value = dict.get(x, key.value, _MISSING) if makes else x[key.value]
        except (KeyError, IndexError, TypeError):
            value = _MISSING
        if value is _MISSING:
            raise machine.refusal(f"{container.name} has no such item", node)
        return usable(machine, world.value(value, f"{container.name}[...]"), node)
    if makes:
        raise machine.refusal(f"{container.name} makes items that it lacks", node)
    values = list(x.values()) if isinstance(x, dict) else list(x)
    result = usable(machine, world.all_of(values, container.name, level), node)
    return Many(result, level) if is_slice(key) else result


def group_item(
    machine: Machine, group: Group, key: Value, node: ast.AST, default: Any = _MISSING
) -> Value:
    """Return an item of a parameter group."""
    if isinstance(key, Known) and key.value == "params":
        return machine.new(
            List(
                None,
                lanes=Base(group.where),
                item=Tensor(role="param"),
                writer="params",
            )
        )
    if key_level(machine, key, node) != Level.UNIFORM:
        raise machine.refusal(
            "it reads a group by a key that differs between lanes", node
        )
    if not isinstance(key, Known):
        raise machine.refusal("it reads a group by an unknown key", node)
    world = machine.world
    place = ("group", key.value)
    groups = world.groups
    if isinstance(group.where, int) and place not in world.written:
        groups = [groups[group.where]]
    values = [
        world.value(g[key.value], f"group[{key.value!r}]")
        for g in groups
        if key.value in g
    ]
    if len(values) < len(groups) and default is not _MISSING:
        values.append(default)
    if place in world.written:
        values.append(world.fields.get(place, uniform()))
    if not values:
        raise machine.refusal(f"no group has {key.value!r}", node)
    result: Value = values[0]
    for x in values[1:]:
        result = join(result, x, Level.UNIFORM)
    if place in world.written and isinstance(result, Known):
        result = Data(Level.UNIFORM, types_of(result))
    return usable(machine, result, node)


def state_item(
    machine: Machine, key: Value, node: ast.AST, default: Value | None = None
) -> Value:
    """Evaluate `state[key]` of the current lane; `default` as in `dict.get`."""
    key_level(machine, key, node)
    fields = machine.world.fields
    result: Value | None = None
    if isinstance(key, Known):
        if not isinstance(key.value, str):
            raise machine.refusal("the state has a key that is not a string", node)
        result = fields.get(key.value)
    else:
        for name, value in fields.items():
            if isinstance(name, str):
                result = value if result is None else join(result, value, Level.KIND)
    other = fields.get(None)
    if other is not None:
        result = other if result is None else join(result, other, Level.KIND)
    if result is None:
        # no state has this key: the branch is not taken, or the read raises
        return Tensor() if default is None else default
    if default is not None:
        result = join(result, default, Level.KIND)
    return usable(machine, result, node)
