"""Items that a step sets: of lists and dicts, of the optimizer's groups and states."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

from . import objects
from .containers import is_slice, item, key_level
from .machine import Machine, usable
from .memory import Added, Dict, List, loose
from .sequences import deals, joined, part
from .values import (
    PLAIN,
    Data,
    Group,
    Held,
    Index,
    Items,
    Known,
    Level,
    Ref,
    State,
    States,
    Tensor,
    Unusable,
    Value,
    join,
    level_of,
    types_of,
)


def store_item(
    machine: Machine, value: Value, key: Value, new: Value, node: ast.AST
) -> None:
    """Evaluate `value[key] = new`."""
    usable(machine, value, node)
    usable(machine, key, node)
    if isinstance(value, State):
        store_state(machine, key, new, node)
    elif isinstance(value, States):
        if not (isinstance(key, Tensor) and key.role == "param"):
            raise machine.refusal(
                "it sets state of something other than the lane's parameter", node
            )
        store_states(machine, new, node)
    elif isinstance(value, Tensor):
        machine.effects += 1
        item(machine, value, key, node)
        from .tensors import Operands

        Operands(machine, node).take(new)
    elif isinstance(value, Group):
        if not isinstance(key, Known) or key.value == "params":
            raise machine.refusal("it sets a group's value by an unknown key", node)
        objects.write(machine, ("group", key.value), new, node)
    elif isinstance(value, Ref):
        store_ref(machine, value, key, new, node)
    elif isinstance(value, Held):
        key_level(machine, key, node)
        objects.write(machine, value.number, new, node)
    else:
        raise machine.refusal("it changes an item of an unknown object", node)


def store_state(machine: Machine, key: Value, new: Value, node: ast.AST) -> None:
    """Set `state[key] = new` of the current lane. Refuse what differs between lanes."""
    machine.effects += 1
    usable(machine, new, node)
    key_level(machine, key, node)
    if isinstance(new, Tensor) and new.foreign:
        raise machine.refusal("two lists may have different lanes", node)
    if isinstance(new, Tensor) and not new.number:
        stored: Value = Tensor(none=new.none, plain=new.plain)
    elif level_of(new) in (Level.UNIFORM, Level.KIND):
        if isinstance(new, Known) and not isinstance(new.value, PLAIN):
            raise machine.refusal("it stores an object in the state of a lane", node)
        types = types_of(new)
        counts = machine.world.counters and (types is None or int in types)
        stored = Data(Level.NUMBER if counts else Level.KIND, types)
    elif level_of(new) == Level.NUMBER and machine.world.counters:
        stored = Data(Level.NUMBER, types_of(new))
    elif isinstance(new, Tensor) or level_of(new) == Level.NUMBER:
        raise machine.refusal("it stores a number read from a lane in the state", node)
    else:
        raise machine.refusal(
            "it stores a value that differs between lanes in the state", node
        )
    if isinstance(key, Known) and not isinstance(key.value, str):
        raise machine.refusal("it stores state under a key that is not a string", node)
    machine.world.field(key.value if isinstance(key, Known) else None, stored)


def store_states(machine: Machine, new: Value, node: ast.AST) -> None:
    """Evaluate `self.state[p] = new`, where `new` is a dict that only this lane has."""
    if isinstance(new, State):
        return
    container = machine.container(new, node) if isinstance(new, Ref) else None
    if (
        not isinstance(container, Dict)
        or not machine.is_local(container)
        or container.other is not None
    ):
        raise machine.refusal("it gives a lane a state that is not a new dict", node)
    for key, value in container.items:
        store_state(machine, Known(key), value, node)


def store_ref(
    machine: Machine, ref: Ref, key: Value, new: Value, node: ast.AST
) -> None:
    """Set `ref[key] = new` in a list or a dict that the step has created."""
    container = machine.now.heap[ref.number]
    if (
        isinstance(container, List)
        and container.lanes is not None
        and isinstance(key, Index)
    ):
        container = machine.container(ref, node)
        assert isinstance(container, List)
        if key.lanes != container.lanes or container.frozen:
            raise machine.refusal("two lists may have different lanes", node)
        assert container.item is not None
        usable(machine, new, node)
        updated = replace(container, item=join(container.item, new, Level.KIND))
        machine.now.heap[ref.number] = updated
        return
    container = machine.container(ref, node)
    usable(machine, new, node)
    if not machine.is_local(container) or (
        isinstance(container, List) and container.frozen
    ):
        raise machine.refusal(
            "a loop over lanes changes an object that belongs to no lane", node
        )
    level = max(key_level(machine, key, node), machine.level)
    if isinstance(container, Dict):
        if isinstance(key, Known) and container.created_in == machine.turns():
            machine.now.heap[ref.number] = container.put(key.value, new)
            return
        other = new if container.other is None else join(container.other, new, level)
        items = tuple((k, join(v, new, level)) for k, v in container.items)
        machine.now.heap[ref.number] = replace(container, items=items, other=other)
        return
    if container.lanes is not None:
        raise machine.refusal("it assigns lanes by position", node)
    if (
        container.items is not None
        and isinstance(key, Known)
        and type(key.value) is int
    ):
        values = list(container.items)
        if (
            -len(values) <= key.value < len(values)
            and container.created_in == machine.turns()
        ):
            values[key.value] = new
            machine.now.heap[ref.number] = replace(container, items=tuple(values))
            return
    if is_slice(key):
        raise machine.refusal("it assigns to a slice of a list", node)
    values_before = (
        list(container.items or ()) if container.many is None else [container.many]
    )
    machine.now.heap[ref.number] = loose(
        replace(container, level=level), [*values_before, new]
    )


def append(machine: Machine, ref: Ref, new: Value, node: ast.AST) -> None:
    """Evaluate `list.append(new)`; in a loop over lanes, each lane appends one."""
    usable(machine, new, node)
    container = machine.now.heap[ref.number]
    if container.broken or not isinstance(container, List):
        raise machine.refusal(
            container.broken or "it appends to an object that is not a list", node
        )
    if container.frozen:
        raise machine.refusal("it changes one of several possible lists", node)
    if machine.is_local(container):
        if container.lanes is not None:
            raise machine.refusal("it adds an item of no lane to a list of lanes", node)
        if container.items is not None and container.created_in == machine.turns():
            updated = replace(container, items=(*container.items, new))
        else:
            items_before = (
                list(container.items or ())
                if container.many is None
                else [container.many]
            )
            level = max(container.level, machine.level)
            updated = loose(replace(container, level=level), [*items_before, new])
        machine.now.heap[ref.number] = updated
        return
    lane = machine.lane
    assert lane is not None
    if container.lane is not None:
        raise machine.refusal("it adds to a list of another lane", node)
    if container.added is not None:
        raise machine.refusal("it adds several items of a lane to a list", node)
    if any(loop.lanes is None for loop in machine.loops[machine.loops.index(lane) :]):
        raise machine.refusal("it adds several items of a lane to a list", node)
    if container.items != () and (
        container.lanes is None or container.writer != lane.site
    ):
        raise machine.refusal(
            "it adds items of lanes and other items to one list", node
        )
    lane.grown.add(ref.number)
    loops = tuple(loop for loop in machine.turns() if loop not in container.created_in)
    updated = replace(container, added=Added(new, (), loops, lane.site))
    machine.now.heap[ref.number] = updated


def over_turns(value: Value) -> Value:
    """Return the abstract value of an item over all turns of a loop.

    Data that is the same for all lanes of one turn may differ between turns, so its
    level is at least `KIND`.
    """
    if isinstance(value, Items):
        return Items(tuple(map(over_turns, value.items)))
    if isinstance(value, Known) and not isinstance(value.value, PLAIN):
        return Unusable("it may differ in each iteration of a loop")
    if isinstance(value, (Known, Data)):
        level = level_of(value)
        assert level is not None
        return Data(max(level, Level.KIND), types_of(value))
    if isinstance(value, Tensor):
        return replace(value, shared=False)
    return value


def settle(machine: Machine, lane: Any) -> None:
    """End a loop over lanes: the items that lanes have appended become readable."""
    heap = machine.now.heap
    for number, container in list(heap.items()):
        if isinstance(container, List) and container.growing:
            container = heap[number] = replace(container, growing=False)
        if isinstance(container, List) and container.added is not None:
            added = container.added
            lanes = joined(part(lane.lanes, added.branches), added.loops)
            if added.loops and not all(deals(lane.lanes, loop) for loop in added.loops):
                heap[number] = replace(
                    container,
                    added=None,
                    broken="it adds several items of a lane to a list",
                )
                continue
            # an item that is uniform within one turn may differ between turns
            new = over_turns(added.item) if added.loops else added.item
            if container.lanes is not None:
                if container.lanes != lanes:
                    heap[number] = replace(
                        container,
                        added=None,
                        broken="a list gets lanes in several ways",
                    )
                    continue
                assert container.item is not None
                new = join(container.item, new, Level.KIND)
            heap[number] = replace(
                container,
                items=None,
                lanes=lanes,
                item=new,
                writer=lane.site,
                added=None,
            )
