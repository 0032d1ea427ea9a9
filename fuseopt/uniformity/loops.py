"""Loops over lanes, over separate items, and over any other iterable."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace

from . import stores
from .machine import Loop, Machine
from .memory import List, Memory, forget, merge
from .values import (
    Carried,
    Data,
    Gathered,
    Known,
    Level,
    Sequence,
    Unusable,
    Value,
    join,
    level_of,
)

#: The largest number of turns until a loop's abstract memory reaches its fixed point.
TURNS = 12
#: The largest number of separate items for which a loop is unrolled.
UNROLLED = 16


def unrolled(
    machine: Machine, items: list[Value], body: Callable[[Value], None], node: ast.AST
) -> None:
    """Walk a loop over separate items, one by one."""
    path = machine.path
    try:
        for k, x in enumerate(items):
            if machine.memory is None:
                return
            machine.path = (*path, id(node), k)
            body(x)
    finally:
        machine.path = path


def _enter(machine: Machine, loop: Loop, variables: set[tuple[int, str]]) -> None:
    """Mark variables that another turn may have set, at the beginning of a turn."""
    scopes = machine.now.scopes
    for scope, name in variables:
        if scope in scopes:
            before = scopes[scope].get(name)
            scopes[scope][name] = Carried(name, before)


def _names(machine: Machine, names: frozenset[str]) -> set[tuple[int, str]]:
    variables: set[tuple[int, str]] = set()
    for name in names:
        scope = machine.place(name)
        if scope is not None:
            variables.add((scope, name))
    return variables


def over_lanes(
    machine: Machine,
    lanes: Sequence,
    body: Callable[[Value], None],
    node: ast.AST,
    names: frozenset[str],
) -> Memory | None:
    """Walk a loop over lanes: its body once, for any lane.

    A variable that another lane may have set is unreadable in the body, unless all
    lanes set it to the same value. Returns the memory after a `break`, None without
    one.
    """
    if machine.lane is not None:
        raise machine.refusal("it loops over lanes within a loop over lanes", node)
    before = machine.now
    variables = _names(machine, names)
    growing: set[int] = set()
    level, effects = machine.level, machine.effects
    while True:
        machine.memory = before.copy()
        loop = Loop(machine.site(node), machine.frame, lanes.lanes)
        loop.scopes = machine.number()
        _enter(machine, loop, variables)
        for number in growing:
            container = machine.now.heap[number]
            assert isinstance(container, List)
            machine.now.heap[number] = replace(container, growing=True)
        machine.lane = loop
        machine.loops.append(loop)
        machine.level = Level.UNIFORM
        try:
            machine.attempt(lambda: body(lanes.item))
        finally:
            machine.loops.pop()
            machine.lane = None
            machine.level = level
        if loop.stores.keys() <= variables and loop.grown <= growing:
            break
        variables |= loop.stores.keys()
        growing |= loop.grown
    for variable, place in loop.firsts.items():
        if any(site != place for site, _ in loop.stores[variable]):
            raise machine.refusal("what the first lane sets is set again", node)
    if (loop.breaks or loop.leaves) and machine.effects != effects:
        raise machine.refusal("a lane ends a loop that changes lanes", node)
    end: Memory | None = machine.memory
    for after, exit_level, site in reversed(loop.continues):
        end = merge(end, after, exit_level, site)
    broken: Memory | None = None
    for after in loop.breaks:
        broken = merge(broken, after, Level.KIND, machine.branch(node))
    if end is None:
        machine.memory = end = before.copy()
        _enter(machine, loop, variables)
    machine.memory = end
    stores.settle(machine, loop)
    _leave(machine, loop, variables, before, broken=False)
    for scope in set(end.scopes) - set(before.scopes):
        del end.scopes[scope]
    for value, after in loop.leaves:
        _break_off(machine, loop, variables, before, end, after)
        loop.frame.returns.append((value, after, Level.UNIFORM))
    if broken is None:
        return None
    _break_off(machine, loop, variables, before, end, broken)
    return broken


def _break_off(
    machine: Machine,
    loop: Loop,
    variables: set[tuple[int, str]],
    before: Memory,
    end: Memory,
    broken: Memory,
) -> None:
    """Set the memory after a lane ends the loop: any number of lanes came before it."""
    why = "lanes are missing after the end of a loop"
    for number, container in broken.heap.items():
        earlier = before.heap.get(number)
        if (
            earlier is None
            or container != earlier
            or (end.heap.get(number) != earlier)
            or (isinstance(container, List) and container.added is not None)
        ):
            broken.heap[number] = List(None, broken=why)
    completed, machine.memory = machine.memory, broken
    _leave(machine, loop, variables, before, broken=True)
    for scope in set(broken.scopes) - set(before.scopes):
        del broken.scopes[scope]
    machine.memory = completed


def _leave(
    machine: Machine,
    loop: Loop,
    variables: set[tuple[int, str]],
    before: Memory,
    broken: bool,
) -> None:
    """Set the variables' values after a loop over lanes."""
    memory = machine.now
    for scope, name in variables:
        if scope not in before.scopes:
            continue
        value = memory.scopes[scope].get(name)
        earlier = before.scopes[scope].get(name)
        if isinstance(value, Carried):
            # no path to this point sets it; if that holds for all lanes, it is unset
            if not broken or not _set_before_break(loop, scope, name, memory):
                _put(memory, scope, name, earlier)
                continue
        _put(memory, scope, name, _left(loop, scope, name, value, earlier, broken))


def _set_before_break(loop: Loop, scope: int, name: str, memory: Memory) -> bool:
    return bool(loop.stores.get((scope, name)))


def _put(memory: Memory, scope: int, name: str, value: Value | None) -> None:
    if value is None:
        memory.scopes[scope].pop(name, None)
    else:
        memory.scopes[scope][name] = value


def _left(
    loop: Loop,
    scope: int,
    name: str,
    value: Value | None,
    earlier: Value | None,
    broken: bool,
) -> Value:
    stores = loop.stores.get((scope, name), [])
    values = [x for _, x in stores]
    bad = Unusable(f"{name} holds a value of the last lane")
    if values and all(isinstance(x, Gathered) for x in values):
        operations = {x.operation for x in values}  # type: ignore[attr-defined]
        if len(operations) == 1 and not broken:
            return Data(Level.UNIFORM, frozenset({bool}))
        return bad
    sites = {site for site, _ in stores}
    same = all(x == values[0] for x in values) if values else False
    if not same or (len(sites) > 1 and not isinstance(values[0], Known)):
        return bad
    new = values[0]
    if level_of(new) != Level.UNIFORM:
        return bad
    if broken and value == new and not isinstance(value, (Carried, Unusable)):
        return new
    if earlier is None:
        return new
    return join(earlier, new, Level.UNIFORM)


def over_many(
    machine: Machine,
    body: Callable[[], None],
    node: ast.AST,
    level: Level,
    names: frozenset[str],
    test: Callable[[], bool] | None = None,
) -> None:
    """Walk any other loop until its memory reaches a fixed point.

    `level`: that of the data that decides the number of turns. `names`: variables it
    sets.
    """
    site = machine.site(node)
    before = machine.now
    forget(before, site)
    head = before.copy()
    variables = _names(machine, names)
    for _ in range(TURNS):
        machine.memory = head.copy()
        loop = Loop(site, machine.frame, level=level)
        loop.scopes = machine.number()
        # a variable that is unset before the loop, and read before the body sets it,
        # has another turn's value
        unset = {
            (scope, name)
            for scope, name in variables
            if scope in head.scopes and name not in head.scopes[scope]
        }
        _enter(machine, loop, unset)
        machine.loops.append(loop)
        try:
            with machine.under(level):
                machine.attempt(body)
        finally:
            machine.loops.pop()
        end = machine.memory
        for after, exit_level, place in reversed(loop.continues):
            end = merge(end, after, max(level, exit_level), place)
        level = max(level, loop.level)
        fresh = {x for x in loop.stores if x not in variables}
        turn = None if end is None else end.copy()
        if turn is not None:
            forget(turn, site)
            for scope, name in unset:
                turn.scopes[scope].pop(name, None)
            for scope in set(turn.scopes) - set(head.scopes):
                del turn.scopes[scope]
        merged: Memory = merge(head, turn, level, site)
        if not fresh and _same_before(merged, head):
            break
        variables |= fresh
        head = merged
    else:
        raise machine.refusal(
            "the analysis of a loop did not reach a fixed point", node
        )
    result: Memory | None = before.copy()
    if end is not None:
        for scope, name in unset:
            if isinstance(end.scopes[scope].get(name), Carried):
                del end.scopes[scope][name]
        result = merge(head.copy(), end, level, site)
    for after in loop.breaks:
        for scope, name in unset:
            if isinstance(after.scopes[scope].get(name), Carried):
                del after.scopes[scope][name]
        result = merge(result, after, level, site)
    assert result is not None
    for scope in set(result.scopes) - set(before.scopes):
        del result.scopes[scope]
    machine.memory = result


def _same_before(merged: Memory, head: Memory) -> bool:
    """Are all variables and containers that existed before the turn unchanged?"""
    if merged.scopes != head.scopes:
        return False
    return all(
        merged.heap.get(number) == container for number, container in head.heap.items()
    )
