"""Iteration over a value, and queries of it: truth, length, membership."""

from __future__ import annotations

import ast
from typing import Any

import torch

from .containers import key_level
from .machine import Machine, usable
from .memory import Dict, List
from .sequences import Sorted
from .values import (
    NUMBER,
    PLAIN,
    Count,
    Data,
    First,
    Group,
    Grouped,
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
    level_of,
    types_of,
    uniform,
)

# ---------------------------------------------------------------- going over


def lanes_of(machine: Machine, value: Value, node: ast.AST) -> Sequence | None:
    """Return a value with one item for each lane as a `Sequence`; None for others."""
    if isinstance(value, Sequence):
        return value
    if isinstance(value, Ref):
        container = machine.container(value, node)
        if isinstance(container, List) and container.lanes is not None:
            assert container.item is not None
            return Sequence(container.lanes, container.item)
    return None


def sorted_lists(machine: Machine, value: Grouped, loop: Any) -> tuple[Value, Value]:
    """Return the key and the lists of one group of lanes sorted by kind."""
    lists: list[Value] = []
    lanes = Sorted(loop, value.lanes)
    for x in value.lists:
        sequence = lanes_of(machine, x, ast.Pass())
        if sequence is None:
            lists.append(machine.list_of())
        else:
            container = List(None, lanes=lanes, item=sequence.item, writer="sorted")
            lists.append(machine.new(container))
    key = Items(value.keys)
    if not value.indices:
        return key, machine.list_of(*lists)
    places = List(None, lanes=lanes, item=Index(value.lanes), writer="sorted")
    return key, Items((machine.list_of(*lists), machine.new(places)))


def spread(
    machine: Machine, value: Value, loop: Any, node: ast.AST
) -> list[Value] | Many | Sequence:
    """Return the items that a loop iterates over.

    A list has a separate abstract value for each item. `Many` has one abstract value
    for any of them, and a `Sequence` one for each lane.
    """
    usable(machine, value, node)
    lanes = lanes_of(machine, value, node)
    if lanes is not None:
        return lanes
    if isinstance(value, Groups):
        return Many(Group(loop))
    if isinstance(value, Items):
        return list(value.items)
    if isinstance(value, Many):
        return value
    if isinstance(value, Ref):
        container = machine.container(value, node)
        if isinstance(container, Dict):
            return _dict_keys(container)
        if container.items is not None:
            return list(container.items)
        if container.many is None:
            return []
        return Many(container.many, container.level)
    if isinstance(value, Held):
        x = machine.world.object(value)
        if value.number in machine.world.written:
            return Many(uniform())
        if isinstance(x, (set, frozenset)):
            raise machine.refusal(f"the order of {value.name} is unknown", node)
        items = list(x)
        if len(items) <= 16 and isinstance(x, (tuple, dict)):
            return [machine.world.value(y, value.name) for y in items]
        return Many(machine.world.all_of(items, value.name, Level.UNIFORM))
    if isinstance(value, Tensor):
        machine.sizes = True
        return Many(Tensor(shared=value.shared, foreign=value.foreign), Level.KIND)
    level = level_of(value)
    if level is not None and level != Level.NUMBER:
        types_ = types_of(value)
        if isinstance(value, Known) and type(value.value) is str:
            return [Known(c) for c in value.value]
        if types_ is not None and types_ & {str, tuple, range}:
            return Many(Data(level), level)
        if types_ == frozenset({torch.Size}):
            return Many(Data(level, frozenset({int})), level)
        if types_ == frozenset({range}):
            return Many(Data(level, frozenset({int})), level)
    raise machine.refusal("it loops over a value that differs between lanes", node)


def _dict_keys(container: Dict) -> list[Value] | Many:
    if container.other is None:
        return [Known(k) for k, _ in container.items]
    return Many(uniform())


# ---------------------------------------------------------------- asking


def truth(machine: Machine, value: Value, node: ast.AST) -> tuple[bool | None, Level]:
    """Return the truth of a value (None: uncertain), and the level that decides it."""
    usable(machine, value, node)
    if isinstance(value, Known):
        if isinstance(value.value, (int, float)) and type(value.value) is not bool:
            return bool(value.value), Level.UNIFORM
        if isinstance(value.value, PLAIN):
            return bool(value.value), Level.UNIFORM
        return True, Level.UNIFORM
    level = level_of(value)
    is_number = level == Level.NUMBER or (isinstance(value, Tensor) and value.number)
    if is_number and machine.in_torch():
        # Dynamo's graph has both branches, and selects between their results; any other
        # effect ends the graph. For other code, the branch not taken is not rehearsed
        return None, Level.NUMBER
    if level == Level.NUMBER or isinstance(value, (Tensor, First)):
        raise machine.refusal("it branches on tensor data", node)
    if level is not None:
        return None, level
    if isinstance(value, Count):
        return None, Level.UNIFORM
    if isinstance(value, State):
        return None, Level.KIND
    if isinstance(value, Groups):
        return bool(machine.world.groups), Level.UNIFORM
    if isinstance(value, (Held, Grouped)):
        return None, Level.UNIFORM
    if isinstance(value, States):
        if machine.lane is not None:
            raise machine.refusal("it tests whether earlier lanes had state", node)
        return None, Level.UNIFORM
    if isinstance(value, Items):
        return bool(value.items), Level.UNIFORM
    if isinstance(value, Ref):
        container = machine.container(value, node)
        if isinstance(container, List):
            if container.items is not None:
                return bool(container.items), Level.UNIFORM
            if container.lanes is not None and machine.lane is not None:
                raise machine.refusal("it reads the number of earlier lanes", node)
            return None, container.level
        if container.other is None:
            return bool(container.items), Level.UNIFORM
        return None, Level.KIND if container.lane is not None else Level.UNIFORM
    if isinstance(value, Many):
        return None, value.level
    if isinstance(value, Sequence) and machine.lane is None:
        return None, Level.UNIFORM
    raise machine.refusal("it branches on a value that differs between lanes", node)


def length(machine: Machine, value: Value, node: ast.AST) -> Value:
    """Evaluate `len(value)`."""
    usable(machine, value, node)
    lanes = lanes_of(machine, value, node)
    if lanes is not None:
        return Count(lanes.lanes)
    if isinstance(value, Items):
        return Data(Level.UNIFORM, frozenset({int}))
    if isinstance(value, Ref):
        container = machine.container(value, node)
        if isinstance(container, List):
            if container.items is not None:
                return Known(len(container.items))
            return Data(container.level, frozenset({int}))
        level = Level.UNIFORM if container.lane is None else Level.KIND
        return Data(level, frozenset({int}))
    if isinstance(value, Many):
        return Data(value.level, frozenset({int}))
    if isinstance(value, State):
        return Data(Level.KIND, frozenset({int}))
    if isinstance(value, States):
        if machine.lane is not None:
            raise machine.refusal("it tests whether earlier lanes had state", node)
        return Count("state")
    if isinstance(value, Grouped) and value.single:
        return Known(1)
    if isinstance(value, (Held, Groups, Grouped)):
        return Data(Level.UNIFORM, frozenset({int}))
    if isinstance(value, Group):
        return Data(Level.UNIFORM, frozenset({int}))
    if isinstance(value, (Tensor, First)):
        machine.sizes = True
        shared = isinstance(value, First) or value.shared
        level = Level.UNIFORM if shared else Level.KIND
        return Data(level, frozenset({int}))
    data_level = level_of(value)
    if data_level is not None and data_level != Level.NUMBER:
        return Data(data_level, frozenset({int}))
    raise machine.refusal(
        "it reads the length of a value that differs between lanes", node
    )


def contains(machine: Machine, value: Value, key: Value, node: ast.AST) -> Value:
    """Evaluate `key in value`."""
    usable(machine, value, node)
    usable(machine, key, node)
    if isinstance(value, State):
        key_level(machine, key, node)
        return Data(Level.KIND, frozenset({bool}))
    if isinstance(value, States):
        if isinstance(key, Tensor) and key.role == "param":
            return Data(Level.KIND, frozenset({bool}))
        raise machine.refusal(
            "it looks up state of something other than the lane's parameter", node
        )
    if level_of(key) == Level.NUMBER and isinstance(value, (Items, Known)):
        return NUMBER
    if isinstance(key, Known) and not isinstance(key.value, PLAIN):
        raise machine.refusal("it looks up an object", node)
    level = key_level(machine, key, node)
    constant = isinstance(key, Known)
    if isinstance(value, Group):
        place = ("group", key.value) if isinstance(key, Known) else None
        if constant and place not in machine.world.written:
            answers = {key.value in g for g in machine.world.groups}  # type: ignore
            if len(answers) == 1:
                return Known(answers.pop())
        return Data(Level.UNIFORM, frozenset({bool}))
    if isinstance(value, Known) and isinstance(value.value, str) and constant:
        return Known(key.value in value.value)  # type: ignore[attr-defined]
    if isinstance(value, Items):
        if constant and all(isinstance(x, Known) for x in value.items):
            return Known(any(x == key for x in value.items))
        for x in value.items:
            level = max(level, key_level(machine, x, node))
        return Data(level, frozenset({bool}))
    if isinstance(value, Ref):
        container = machine.container(value, node)
        if isinstance(container, Dict):
            if constant and container.other is None:
                return Known(container.get(key.value) is not None)  # type: ignore
            container_level = Level.UNIFORM if container.lane is None else Level.KIND
            return Data(max(level, container_level), frozenset({bool}))
        if container.lanes is None:
            for y in (*(container.items or ()), container.many):
                if y is not None:
                    level = max(level, key_level(machine, y, node))
            return Data(max(level, container.level), frozenset({bool}))
        raise machine.refusal("it searches for a lane", node)
    if isinstance(value, Held) or level_of(value) is not None:
        value_level = level_of(value)
        level = level if value_level is None else max(level, value_level)
        return Data(level, frozenset({bool}))
    raise machine.refusal("it looks up a value that differs between lanes", node)
