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
    Bad,
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
    Value,
    join,
    level_of,
    types_of,
)


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
        types = types_of(new)
        counts = machine.world.counters and (types is None or int in types)
        kept = Data(Level.NUMBER if counts else Level.KIND, types)
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
    before = list(held.items or ()) if held.many is None else [held.many]
    machine.now.heap[ref.number] = loose(replace(held, level=level), [*before, new])


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
            before = list(held.items or ()) if held.many is None else [held.many]
            level = max(held.level, machine.level)
            now = loose(replace(held, level=level), [*before, new])
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
