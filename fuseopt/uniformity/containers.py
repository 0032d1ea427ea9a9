"""Items: of lists, dicts and tuples, of the optimizer's groups and states."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch

from . import objects
from .machine import Machine, usable
from .memory import Added, Dict, List, loose
from .sequences import Base, deals, joined, part
from .values import (
    PLAIN,
    Bad,
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
    """The level of a key or an index, which must not be a number or an object."""
    if isinstance(key, Items):
        return max((key_level(machine, x, node) for x in key.items), default=Level(0))
    if isinstance(key, Index):
        raise machine.refusal("it uses where a lane stands", node)
    if isinstance(key, Tensor):
        raise machine.refusal("it looks up a tensor of a lane", node)
    level = level_of(key)
    if level is None or level == Level.NUMBER:
        raise machine.refusal("it looks up what differs between lanes", node)
    if isinstance(key, Known) and not isinstance(key.value, PLAIN):
        raise machine.refusal("it looks up an object", node)
    return level


def is_slice(key: Value) -> bool:
    """Is it a slice, not an index?"""
    types_ = types_of(key)
    return types_ is not None and slice in types_


# ---------------------------------------------------------------- reading


def item(machine: Machine, value: Value, key: Value, node: ast.AST) -> Value:
    """`value[key]`."""
    usable(machine, value, node)
    usable(machine, key, node)
    if isinstance(value, Known) and not isinstance(value.value, PLAIN):
        if isinstance(value.value, type) or type(value.value).__module__ == "typing":
            return Known(object)  # of a type that is cast to
    if isinstance(value, States):
        if isinstance(key, Tensor) and key.role == "param":
            return State()
        raise machine.refusal(
            "it reads state of what is not the lane's parameter", node
        )
    if isinstance(value, State):
        return state_item(machine, key, node)
    if isinstance(value, Tensor):
        from .tensors import Operands

        operands = Operands(machine, node)
        operands.take(value)
        operands.take(key)
        if operands.number and not value.number:
            raise machine.refusal("it takes a part by a number read from a lane", node)
        return Tensor(shared=operands.shared, foreign=operands.foreign)
    if isinstance(value, Group):
        return group_item(machine, value, key, node)
    if isinstance(value, Groups):
        if isinstance(key, Known) and type(key.value) is int:
            if -len(machine.world.groups) <= key.value < len(machine.world.groups):
                return Group(key.value % len(machine.world.groups))
        raise machine.refusal("it does not say which group it reads", node)
    if isinstance(value, Ref):
        return ref_item(machine, value, key, node)
    if isinstance(value, Sequence):
        if isinstance(key, Index) and key.lanes == value.lanes:
            return usable(machine, value.item, node)
        if key == Known(0):
            return first_of(machine, value.item, node)
        raise machine.refusal("lists are not known to have the same lanes", node)
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
    raise machine.refusal("it reads an item of what differs between lanes", node)


def _part_types(value: Value, key: Value) -> frozenset[type] | None:

    own = types_of(value)
    if own == frozenset({torch.Size}):
        return own if is_slice(key) else frozenset({int})
    return own if own == frozenset({str}) else None


def _tuple_item(machine: Machine, value: Items, key: Value, node: ast.AST) -> Value:
    if isinstance(key, Known) and type(key.value) is int:
        if -len(value.items) <= key.value < len(value.items):
            return usable(machine, value.items[key.value], node)
        raise machine.refusal("a tuple has not so many items", node)
    if isinstance(key, Known) and isinstance(key.value, slice):
        return Items(value.items[key.value])
    level = key_level(machine, key, node)
    if is_slice(key) or not value.items:
        raise machine.refusal("it takes a part of a tuple that is not known", node)
    found = value.items[0]
    for x in value.items[1:]:
        found = join(found, x, level)
    if isinstance(found, (Known, Data)):
        found = join(found, Data(level, types_of(found)), level)
    return usable(machine, found, node)


def ref_item(machine: Machine, ref: Ref, key: Value, node: ast.AST) -> Value:
    """An item of a list or a dict that the step made."""
    held = machine.now.heap[ref.number]
    if isinstance(held, List) and held.added is not None:
        if isinstance(key, Known) and key.value == -1 and machine.lane is not None:
            if not held.added.branches:
                return usable(machine, held.added.item, node)
    held = machine.held(ref, node)
    if isinstance(held, Dict):
        if isinstance(key, Known):
            found = held.get(key.value)
            if found is not None:
                return usable(machine, found, node)
        level = key_level(machine, key, node)
        values = [v for _, v in held.items]
        if held.other is not None:
            values.append(held.other)
        if not values:
            raise machine.refusal("a dict has no such item", node)
        result = values[0]
        for x in values[1:]:
            result = join(result, x, level)
        if isinstance(result, (Known, Data)):
            result = join(result, Data(level, types_of(result)), level)
        return usable(machine, result, node)
    if held.lanes is not None:
        if isinstance(key, Index):
            if key.lanes != held.lanes:
                raise machine.refusal(
                    "lists are not known to have the same lanes", node
                )
            assert held.item is not None
            return usable(machine, held.item, node)
        if key == Known(0):
            return first_of(machine, held.item, node)
        if isinstance(key, Known) and key.value == slice(None):
            return machine.new(replace(held, added=None))
        raise machine.refusal("it takes lanes by their places", node)
    if isinstance(key, Known) and held.items is not None:
        if type(key.value) is int or isinstance(key.value, slice):
            found = _tuple_item(machine, Items(held.items), key, node)
            if isinstance(found, Items) and isinstance(key.value, slice):
                return machine.list_of(*found.items)
            return found
    level = key_level(machine, key, node)
    if held.items is not None and not is_slice(key):
        return _tuple_item(machine, Items(held.items), key, node)
    if held.items is not None or held.many is None:
        raise machine.refusal("it takes a part of a list that is not known", node)
    if is_slice(key):
        return machine.new(List(None, held.many, max(level, held.level)))
    return usable(machine, join(held.many, held.many, level), node)


def first_of(machine: Machine, value: Value | None, node: ast.AST) -> Value:
    """What the first of some lanes has: the lane leads, and its kind is that of all."""
    if isinstance(value, Tensor):
        return First()
    level = None if value is None else level_of(value)
    if value is not None and level is not None and level != Level.NUMBER:
        return Data(Level.UNIFORM, types_of(value))
    raise machine.refusal("it takes lanes by their places", node)


def held_item(machine: Machine, held: Held, key: Value, node: ast.AST) -> Value:
    """An item of a container that exists besides the step."""
    world = machine.world
    level = key_level(machine, key, node)
    x = world.object(held)
    if held.number in world.written:
        return Data(level)
    if isinstance(key, Known) and not is_slice(key):
        try:
            found = x[key.value]
        except (KeyError, IndexError, TypeError):
            raise machine.refusal(f"{held.name} has no such item", node) from None
        return usable(machine, world.value(found, f"{held.name}[...]"), node)
    values = list(x.values()) if isinstance(x, dict) else list(x)
    result = usable(machine, world.all_of(values, held.name, level), node)
    return Many(result, level) if is_slice(key) else result


def group_item(
    machine: Machine, group: Group, key: Value, node: ast.AST, default: Any = _MISSING
) -> Value:
    """An item of a parameter group."""
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
        raise machine.refusal("it reads a group by what differs between lanes", node)
    if not isinstance(key, Known):
        raise machine.refusal("it does not say what it reads of a group", node)
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
    """An item of the state of the lane at hand."""
    key_level(machine, key, node)
    fields = machine.world.fields
    found: Value | None = None
    if isinstance(key, Known):
        if not isinstance(key.value, str):
            raise machine.refusal("the state has a key that is no string", node)
        found = fields.get(key.value)
    else:
        for name, value in fields.items():
            if isinstance(name, str):
                found = value if found is None else join(found, value, Level.KIND)
    other = fields.get(None)
    if other is not None:
        found = other if found is None else join(found, other, Level.KIND)
    if found is None:
        # in a way that is not taken, or one that raises
        return Tensor() if default is None else default
    if default is not None:
        found = join(found, default, Level.KIND)
    return usable(machine, found, node)


# ---------------------------------------------------------------- writing


def store_item(
    machine: Machine, value: Value, key: Value, new: Value, node: ast.AST
) -> None:
    """`value[key] = new`."""
    usable(machine, value, node)
    usable(machine, key, node)
    if isinstance(value, State):
        store_state(machine, key, new, node)
    elif isinstance(value, States):
        if not (isinstance(key, Tensor) and key.role == "param"):
            raise machine.refusal(
                "it sets state of what is not the lane's parameter", node
            )
        store_states(machine, new, node)
    elif isinstance(value, Tensor):
        machine.effects += 1
        item(machine, value, key, node)
        from .tensors import Operands

        Operands(machine, node).take(new)
    elif isinstance(value, Group):
        if not isinstance(key, Known) or key.value == "params":
            raise machine.refusal("it does not say what it sets of a group", node)
        objects.write(machine, ("group", key.value), new, node)
    elif isinstance(value, Ref):
        store_ref(machine, value, key, new, node)
    elif isinstance(value, Held):
        key_level(machine, key, node)
        objects.write(machine, value.number, new, node)
    else:
        raise machine.refusal("it changes an item of what is not known", node)


def store_state(machine: Machine, key: Value, new: Value, node: ast.AST) -> None:
    """Set an item of the state of the lane at hand."""
    machine.effects += 1
    usable(machine, new, node)
    key_level(machine, key, node)
    if isinstance(new, Tensor) and new.foreign:
        raise machine.refusal("lists are not known to have the same lanes", node)
    if isinstance(new, Tensor) and not new.number:
        kept: Value = Tensor(none=new.none, plain=new.plain)
    elif level_of(new) in (Level.UNIFORM, Level.KIND):
        if isinstance(new, Known) and not isinstance(new.value, PLAIN):
            raise machine.refusal("the state of a lane is given an object", node)
        types_ = types_of(new)
        counts = machine.world.counters and (types_ is None or int in types_)
        kept = Data(Level.NUMBER if counts else Level.KIND, types_)
    elif level_of(new) == Level.NUMBER and machine.world.counters:
        kept = Data(Level.NUMBER, types_of(new))
    elif isinstance(new, Tensor) or level_of(new) == Level.NUMBER:
        raise machine.refusal(
            "the state keeps a number that was read from a lane", node
        )
    else:
        raise machine.refusal(
            "the state of a lane is given what differs between lanes", node
        )
    if isinstance(key, Known) and not isinstance(key.value, str):
        raise machine.refusal("the state is given a key that is no string", node)
    machine.world.field(key.value if isinstance(key, Known) else None, kept)


def store_states(machine: Machine, new: Value, node: ast.AST) -> None:
    """`self.state[p] = new`, a dict made for it."""
    if isinstance(new, State):
        return
    held = machine.held(new, node) if isinstance(new, Ref) else None
    if not isinstance(held, Dict) or not machine.own(held) or held.other is not None:
        raise machine.refusal(
            "the state of a lane is given what is no dict of its own", node
        )
    for key, value in held.items:
        store_state(machine, Known(key), value, node)


def store_ref(
    machine: Machine, ref: Ref, key: Value, new: Value, node: ast.AST
) -> None:
    """Set an item of a list or a dict that the step made."""
    held = machine.now.heap[ref.number]
    if isinstance(held, List) and held.lanes is not None and isinstance(key, Index):
        held = machine.held(ref, node)
        assert isinstance(held, List)
        if key.lanes != held.lanes or held.frozen:
            raise machine.refusal("lists are not known to have the same lanes", node)
        assert held.item is not None
        usable(machine, new, node)
        now = replace(held, item=join(held.item, new, Level.KIND))
        machine.now.heap[ref.number] = now
        return
    held = machine.held(ref, node)
    usable(machine, new, node)
    if not machine.own(held) or (isinstance(held, List) and held.frozen):
        raise machine.refusal("a loop over lanes changes what is not a lane's", node)
    level = max(key_level(machine, key, node), machine.level)
    if isinstance(held, Dict):
        if isinstance(key, Known) and held.made == machine.turns():
            machine.now.heap[ref.number] = held.put(key.value, new)
            return
        other = new if held.other is None else join(held.other, new, level)
        items = tuple((k, join(v, new, level)) for k, v in held.items)
        machine.now.heap[ref.number] = replace(held, items=items, other=other)
        return
    if held.lanes is not None:
        raise machine.refusal("it sets lanes by their places", node)
    if held.items is not None and isinstance(key, Known) and type(key.value) is int:
        values = list(held.items)
        if -len(values) <= key.value < len(values) and held.made == machine.turns():
            values[key.value] = new
            machine.now.heap[ref.number] = replace(held, items=tuple(values))
            return
    if is_slice(key):
        raise machine.refusal("it sets a part of a list", node)
    known = list(held.items or ()) if held.many is None else [held.many]
    machine.now.heap[ref.number] = loose(replace(held, level=level), [*known, new])


def append(machine: Machine, ref: Ref, new: Value, node: ast.AST) -> None:
    """`list.append(new)`: within a loop over lanes, one more of each lane."""
    usable(machine, new, node)
    held = machine.now.heap[ref.number]
    if held.broken or not isinstance(held, List):
        raise machine.refusal(held.broken or "it appends to what is no list", node)
    if held.frozen:
        raise machine.refusal("it changes a list that may be another", node)
    if machine.own(held):
        if held.lanes is not None:
            raise machine.refusal("it adds to lanes what is none", node)
        if held.items is not None and held.made == machine.turns():
            now = replace(held, items=(*held.items, new))
        else:
            known = list(held.items or ()) if held.many is None else [held.many]
            level = max(held.level, machine.level)
            now = loose(replace(held, level=level), [*known, new])
        machine.now.heap[ref.number] = now
        return
    lane = machine.lane
    assert lane is not None
    if held.lane is not None:
        raise machine.refusal("it adds to a list of another lane", node)
    if held.added is not None:
        raise machine.refusal("a list gets several items of a lane", node)
    if any(loop.lanes is None for loop in machine.loops[machine.loops.index(lane) :]):
        raise machine.refusal("a list gets several items of a lane", node)
    if held.items != () and (held.lanes is None or held.writer != lane.site):
        raise machine.refusal("a list gets items of lanes and others", node)
    lane.grown.add(ref.number)
    loops = tuple(x for x in machine.turns() if x not in held.made)
    now = replace(held, added=Added(new, (), loops, lane.site))
    machine.now.heap[ref.number] = now


def own_of(value: Value) -> Value:
    """What is uniform in each turn of a loop, beside lanes of all its turns."""
    if isinstance(value, Items):
        return Items(tuple(map(own_of, value.items)))
    if isinstance(value, Known) and not isinstance(value.value, PLAIN):
        return Bad("it may be another in each turn of a loop")
    if isinstance(value, (Known, Data)):
        level = level_of(value)
        assert level is not None
        return Data(max(level, Level.KIND), types_of(value))
    if isinstance(value, Tensor):
        return replace(value, shared=False)
    return value


def settle(machine: Machine, lane: Any) -> None:
    """End a loop over lanes: what each has added to lists is there now."""
    heap = machine.now.heap
    for number, held in list(heap.items()):
        if isinstance(held, List) and held.growing:
            held = heap[number] = replace(held, growing=False)
        if isinstance(held, List) and held.added is not None:
            added = held.added
            lanes = joined(part(lane.lanes, added.branches), added.loops)
            if added.loops and not all(deals(lane.lanes, x) for x in added.loops):
                heap[number] = replace(
                    held, added=None, broken="a list gets several items of a lane"
                )
                continue
            # the same for the lanes of a turn is not the same for all
            new = own_of(added.item) if added.loops else added.item
            if held.lanes is not None:
                if held.lanes != lanes:
                    heap[number] = replace(
                        held, added=None, broken="a list gets lanes in several ways"
                    )
                    continue
                assert held.item is not None
                new = join(held.item, new, Level.KIND)
            heap[number] = replace(
                held, items=None, lanes=lanes, item=new, writer=lane.site, added=None
            )
