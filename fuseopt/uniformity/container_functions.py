"""Rules for functions of containers: `len`, `range`, `zip`, `list`, `sorted`."""

from __future__ import annotations

import ast
import builtins
import copy
from typing import Any

from . import iteration
from .functions import Args, Keywords, compute, rule
from .machine import Machine, usable
from .memory import Dict, List, pure
from .values import (
    Count,
    Data,
    Group,
    Index,
    Items,
    Known,
    Level,
    Many,
    Ref,
    Sequence,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
    uniform,
)


@rule(builtins.len)
def _len(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return iteration.length(machine, args[0], node)


@rule(builtins.range)
def _range(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    for value in args:
        usable(machine, value, node)
    if isinstance(args[-1], Count) and all(x == Known(0) for x in args[:-1]):
        lanes = args[-1].lanes
        if len(args) < 3 and lanes != "state":
            return Sequence(lanes, Index(lanes))
    computed = compute(machine, args, node)
    level = level_of(computed)
    assert level is not None
    if level == Level.NUMBER:
        raise machine.refusal("it counts to a number read from a lane", node)
    values = [x.value for x in args if isinstance(x, Known)]
    if len(values) == len(args):
        numbers = range(*values)
        if len(numbers) <= 8:
            return Items(tuple(Known(i) for i in numbers))
    return Many(Data(level, frozenset({int})), level)


@rule(builtins.enumerate)
def _enumerate(
    machine: Machine, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    sequence = iteration.lanes_of(machine, args[0], node)
    start = args[1] if len(args) > 1 else keywords.get("start", Known(0))
    if sequence is not None:
        if start != Known(0):
            raise machine.refusal("it counts lanes from a number other than 0", node)
        return Sequence(sequence.lanes, Items((Index(sequence.lanes), sequence.item)))
    items = iteration.spread(machine, args[0], machine.site(node), node)
    assert not isinstance(items, Sequence)
    if isinstance(items, list):
        if isinstance(start, Known):
            return Items(
                tuple(Items((Known(start.value + i), x)) for i, x in enumerate(items))
            )
        return Items(tuple(Items((uniform(int), x)) for x in items))
    if isinstance(items.item, Group):
        return Many(Items((uniform(int), items.item)))
    return Many(Items((Data(items.level, frozenset({int})), items.item)), items.level)


@rule(builtins.zip)
def _zip(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if keywords.keys() - {"strict"}:
        raise machine.refusal("the result of this call is unknown", node)
    sequences = [iteration.lanes_of(machine, sequence, node) for sequence in args]
    if any(sequence is not None for sequence in sequences):
        items: list[Value] = []
        lanes: Any = next(
            sequence.lanes for sequence in sequences if sequence is not None
        )
        for sequence, value in zip(sequences, args, strict=True):
            if sequence is None:
                if empty(machine, value):
                    return Items(())
                raise machine.refusal("it pairs lanes with items by position", node)
            item = sequence.item
            if sequence.lanes != lanes:
                if not pure(item):
                    raise machine.refusal("two lists may have different lanes", node)
                assert isinstance(item, Tensor)
                item = Tensor(none=item.none, foreign=True)
            items.append(item)
        return Sequence(lanes, Items(tuple(items)))
    spread = [
        iteration.spread(machine, sequence, machine.site(node), node)
        for sequence in args
    ]
    if all(isinstance(sequence, list) for sequence in spread):
        rows = zip(*spread, strict=False)
        return Items(tuple(Items(tuple(row)) for row in rows))
    level = Level.UNIFORM
    parts: list[Value] = []
    for column in spread:
        if isinstance(column, list):
            if not column:
                return Items(())
            joined = column[0]
            for y in column[1:]:
                joined = join(joined, y, Level.UNIFORM)
            parts.append(joined)
        else:
            assert isinstance(column, Many)
            level = max(level, column.level)
            parts.append(column.item)
    return Many(Items(tuple(parts)), level)


def empty(machine: Machine, value: Value) -> bool:
    """Is it certainly an empty list or tuple?"""
    if isinstance(value, Ref):
        container = machine.now.heap[value.number]
        return (
            isinstance(container, List)
            and container.items == ()
            and not container.broken
        )
    return value == Items(())


@rule(list, tuple)
def _list(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if not args:
        return machine.list_of()
    value = args[0]
    sequence = iteration.lanes_of(machine, value, node)
    if sequence is not None:
        return machine.new(
            List(
                None,
                lanes=sequence.lanes,
                item=sequence.item,
                writer=machine.site(node),
            )
        )
    items = iteration.spread(machine, value, machine.site(node), node)
    if isinstance(items, list):
        return machine.list_of(*items)
    assert isinstance(items, Many)
    if isinstance(items.item, Group):
        return value
    return machine.new(List(None, items.item, items.level))


@rule(builtins.reversed, builtins.sorted, set, frozenset)
def _ordered(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if iteration.lanes_of(machine, args[0], node) is not None:
        raise machine.refusal("it takes lanes in a different order", node)
    if keywords.keys() - {"reverse"}:
        raise machine.refusal("it sorts by a key function", node)
    items = iteration.spread(machine, args[0], machine.site(node), node)
    assert not isinstance(items, Sequence)
    values = items if isinstance(items, list) else [items.item]
    level = Level.UNIFORM if isinstance(items, list) else items.level
    computed = compute(machine, values, node)
    item_level = level_of(computed)
    if item_level is None or item_level == Level.NUMBER:
        raise machine.refusal("it sorts values that differ between lanes", node)
    types_: frozenset[type] | None = frozenset()
    for x in values:
        item_types = types_of(x)
        types_ = None if item_types is None or types_ is None else types_ | item_types
    return machine.new(
        List(None, Data(max(item_level, level), types_), max(item_level, level))
    )


@rule(dict)
def _dict(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if args:
        raise machine.refusal("it makes a dict of unknown values", node)
    return machine.new(Dict(tuple(keywords.items())))


@rule(copy.copy)
def _copy(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if level_of(args[0]) is not None:
        return args[0]
    raise machine.refusal("it copies an object", node)
