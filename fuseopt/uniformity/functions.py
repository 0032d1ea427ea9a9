"""Functions that are no source: of Python, of math, of torch besides ATen.

Each takes the machine, the arguments and the call, and gives what is known of the
result. A function that has no line here is refused.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
import numbers
import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.optim.optimizer as torch_optimizer

from . import iteration, objects, tensors
from .machine import Machine, usable
from .memory import Dict, List, pure
from .values import (
    NUMERIC,
    PLAIN,
    Count,
    Data,
    First,
    Group,
    Held,
    Index,
    Items,
    Known,
    Level,
    Many,
    Optimizer,
    Ref,
    Sequence,
    State,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
    uniform,
)

Args = list[Value]
Keywords = dict[str, Value]
Rule = Callable[[Machine, Args, Keywords, ast.AST], Value]
RULES: dict[int, Rule] = {}
_alive: list[Any] = []


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Say what is known of calls of some functions."""

    def take(made: Rule) -> Rule:
        for function in functions:
            if function is not None:
                _alive.append(function)
                RULES[id(function)] = made
        return made

    return take


def odd(value: Value) -> str:
    """What differs between lanes, in words."""
    if isinstance(value, Index):
        return "where a lane stands"
    if isinstance(value, Count):
        return "how many lanes there are"
    return "what differs between lanes"


def compute(
    machine: Machine, args: list[Value], node: ast.AST, types: tuple[type, ...] = ()
) -> Value:
    """Plain data computed from some: of the level of what is known least of."""
    level = Level.UNIFORM
    numeric = True
    for value in args:
        usable(machine, value, node)
        numeric = numeric and _numbers(value)
        if isinstance(value, Tensor):
            # the function asks for its contents
            if value.foreign:
                raise machine.refusal(
                    "lists are not known to have the same lanes", node
                )
            level = Level.NUMBER
            continue
        if isinstance(value, Items):
            own: Level | None = level_of(compute(machine, list(value.items), node))
        elif isinstance(value, Many):
            own = level_of(compute(machine, [value.item], node))
            own = None if own is None else max(own, value.level)
        elif isinstance(value, Ref):
            own = _of_list(machine, value, node)
        else:
            own = level_of(value)
        if own is None or (
            isinstance(value, Known) and not isinstance(value.value, PLAIN)
        ):
            raise machine.refusal(f"it computes with {odd(value)}", node)
        level = max(level, own)
    if types:
        return Data(level, frozenset(types))
    return Data(level, NUMERIC if numeric else None)


def _numbers(value: Value) -> bool:
    """Is it a number, or several? Then what is computed from it is no other thing."""
    if isinstance(value, Items):
        return all(map(_numbers, value.items))
    own = types_of(value)
    return isinstance(value, Tensor) or (own is not None and own <= NUMERIC)


def _of_list(machine: Machine, value: Ref, node: ast.AST) -> Level | None:
    held = machine.held(value, node)
    if not isinstance(held, List) or held.lanes is not None:
        return None
    known = [*(held.items or ()), *([] if held.many is None else [held.many])]
    found = level_of(compute(machine, known, node))
    return None if found is None else max(found, held.level)


# ---------------------------------------------------------------- numbers

_NUMERIC = [
    *(getattr(math, n) for n in dir(math) if callable(getattr(math, n))),
    builtins.round,
    builtins.divmod,
    builtins.complex,
    builtins.ord,
    builtins.chr,
    builtins.bin,
    builtins.hex,
]


@rule(*[f for f in _NUMERIC if f not in (math.prod, math.fsum)])
def _numeric(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return compute(machine, [*args, *keywords.values()], node)


@rule(float)
def _float(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return compute(machine, args, node, (float,))


@rule(int)
def _int(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return compute(machine, args, node, (int,))


@rule(builtins.abs, builtins.pow)
def _abs(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if any(isinstance(x, Tensor) for x in args):
        return tensors.aten(machine, "pow" if len(args) > 1 else "abs", args, {}, node)
    return compute(machine, args, node)


@rule(bool)
def _bool(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if not args:
        return Known(False)
    found, level = iteration.truth(machine, args[0], node)
    return Known(found) if found is not None else Data(level, frozenset({bool}))


@rule(builtins.min, builtins.max)
def _bound(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if keywords.keys() - {"default"}:
        raise machine.refusal("it compares by a function", node)
    if len(args) == 1:
        return _fold(machine, args[0], list(keywords.values()), node)
    return _of_all(machine, args, node)


@rule(builtins.sum, math.prod, math.fsum)
def _sum(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return _fold(machine, args[0], [*args[1:], *keywords.values()], node)


def _fold(machine: Machine, over: Value, more: Args, node: ast.AST) -> Value:
    """What several give together that are gone through."""
    if iteration.lanes_of(machine, over, node) is not None:
        raise machine.refusal("it computes what all lanes give together", node)
    items = iteration.spread(machine, over, machine.site(node), node)
    assert not isinstance(items, Sequence)
    if isinstance(items, list):
        return _of_all(machine, [*items, *more], node)
    found = _of_all(machine, [items.item, *more], node)
    own = level_of(found)
    return found if own is None else Data(max(own, items.level), types_of(found))


def _of_all(machine: Machine, args: Args, node: ast.AST) -> Value:
    found = compute(machine, args, node)
    if any(isinstance(x, Tensor) for x in args):
        return _of_tensors(args)
    return found


def _of_tensors(args: Args) -> Value:
    shared = all(isinstance(x, Tensor) and x.shared for x in args)
    foreign = any(isinstance(x, Tensor) and x.foreign for x in args)
    return Tensor(shared=shared, number=True, foreign=foreign)


@rule(builtins.any, builtins.all)
def _any(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    over = iteration.lanes_of(machine, args[0], node)
    if over is not None:
        iteration.truth(machine, over.item, node)
        return Data(Level.UNIFORM, frozenset({bool}))
    items = iteration.spread(machine, args[0], machine.site(node), node)
    if isinstance(items, Sequence):
        raise machine.refusal("it asks of lanes", node)
    known = items if isinstance(items, list) else [items.item]
    worst = Level.UNIFORM if isinstance(items, list) else items.level
    for x in known:
        level = iteration.truth(machine, x, node)[1]
        worst = max(worst, level)
    return Data(worst, frozenset({bool}))


# ---------------------------------------------------------------- types

#: Classes of which a tensor is one, or is none, whatever it stands for.
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
        raise machine.refusal("it asks for the class of what is not known", node)
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
    raise machine.refusal("it asks for a class that is not known", node)


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
    """Is it torch that asks, to choose a form of its steps which nobody asked for?"""
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
        raise machine.refusal("it asks for the class of what is not known", node)
    return Known(python)


@rule(builtins.issubclass)
def _issubclass(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    a, b = args
    if isinstance(a, Known) and isinstance(b, Known):
        return Known(issubclass(a.value, b.value))
    raise machine.refusal("it asks for a class that is not known", node)


@rule(builtins.callable)
def _callable(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if isinstance(args[0], Known):
        return Known(callable(args[0].value))
    if isinstance(args[0], (Data, Tensor, Items, Ref)):
        return Known(False)
    raise machine.refusal("it asks what is not known", node)


# ---------------------------------------------------------------- containers


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
    found = compute(machine, args, node)
    level = level_of(found)
    assert level is not None
    if level == Level.NUMBER:
        raise machine.refusal("it counts to a number that was read from a lane", node)
    values = [x.value for x in args if isinstance(x, Known)]
    if len(values) == len(args):
        known = range(*values)
        if len(known) <= 8:
            return Items(tuple(Known(i) for i in known))
    return Many(Data(level, frozenset({int})), level)


@rule(builtins.enumerate)
def _enumerate(
    machine: Machine, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    over = iteration.lanes_of(machine, args[0], node)
    start = args[1] if len(args) > 1 else keywords.get("start", Known(0))
    if over is not None:
        if start != Known(0):
            raise machine.refusal("it counts lanes from another number than 0", node)
        return Sequence(over.lanes, Items((Index(over.lanes), over.item)))
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
        raise machine.refusal("it is not known what this gives", node)
    over = [iteration.lanes_of(machine, x, node) for x in args]
    if any(x is not None for x in over):
        items: list[Value] = []
        lanes: Any = next(x.lanes for x in over if x is not None)
        for x, value in zip(over, args, strict=True):
            if x is None:
                if empty(machine, value):
                    return Items(())
                raise machine.refusal("it gives lanes items by their places", node)
            item = x.item
            if x.lanes != lanes:
                if not pure(item):
                    raise machine.refusal(
                        "lists are not known to have the same lanes", node
                    )
                assert isinstance(item, Tensor)
                item = Tensor(none=item.none, foreign=True)
            items.append(item)
        return Sequence(lanes, Items(tuple(items)))
    spread = [iteration.spread(machine, x, machine.site(node), node) for x in args]
    if all(isinstance(x, list) for x in spread):
        rows = zip(*spread, strict=False)
        return Items(tuple(Items(tuple(row)) for row in rows))
    level = Level.UNIFORM
    parts: list[Value] = []
    for column in spread:
        if isinstance(column, list):
            if not column:
                return Items(())
            found = column[0]
            for y in column[1:]:
                found = join(found, y, Level.UNIFORM)
            parts.append(found)
        else:
            assert isinstance(column, Many)
            level = max(level, column.level)
            parts.append(column.item)
    return Many(Items(tuple(parts)), level)


def empty(machine: Machine, value: Value) -> bool:
    """Is it a list or a tuple that is known to be empty?"""
    if isinstance(value, Ref):
        held = machine.now.heap[value.number]
        return isinstance(held, List) and held.items == () and not held.broken
    return value == Items(())


@rule(list, tuple)
def _list(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if not args:
        return machine.list_of()
    value = args[0]
    over = iteration.lanes_of(machine, value, node)
    if over is not None:
        return machine.new(
            List(None, lanes=over.lanes, item=over.item, writer=machine.site(node))
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
        raise machine.refusal("it takes lanes in an order of its own", node)
    if keywords.keys() - {"reverse"}:
        raise machine.refusal("it sorts by a function", node)
    items = iteration.spread(machine, args[0], machine.site(node), node)
    assert not isinstance(items, Sequence)
    known = items if isinstance(items, list) else [items.item]
    level = Level.UNIFORM if isinstance(items, list) else items.level
    found = compute(machine, known, node)
    own = level_of(found)
    if own is None or own == Level.NUMBER:
        raise machine.refusal("it sorts what differs between lanes", node)
    types_: frozenset[type] | None = frozenset()
    for x in known:
        theirs = types_of(x)
        types_ = None if theirs is None or types_ is None else types_ | theirs
    return machine.new(List(None, Data(max(own, level), types_), max(own, level)))


@rule(dict)
def _dict(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if args:
        raise machine.refusal("it makes a dict of what is not known", node)
    return machine.new(Dict(tuple(keywords.items())))


@rule(copy.copy)
def _copy(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if level_of(args[0]) is not None:
        return args[0]
    raise machine.refusal("it copies an object", node)


# ---------------------------------------------------------------- attributes by name


@rule(builtins.getattr)
def _getattr(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:

    value, name = usable(machine, args[0], node), args[1]
    if not isinstance(name, Known) or type(name.value) is not str:
        raise machine.refusal("it reads an attribute whose name is not known", node)
    if isinstance(value, Optimizer):
        found = objects.of_optimizer(machine, value, name.value, node)
        if found is None:
            if len(args) > 2:
                return args[2]
            raise machine.refusal(f"the optimizer has no attribute {name.value}", node)
        return found
    return objects.attribute(machine, value, name.value, node)


@rule(builtins.hasattr)
def _hasattr(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:

    value, name = usable(machine, args[0], node), args[1]
    if not isinstance(name, Known) or type(name.value) is not str:
        raise machine.refusal("it asks for an attribute whose name is not known", node)
    if isinstance(value, Optimizer):
        if ("attribute", name.value) in machine.world.written:
            return uniform(bool)
        found = objects.of_optimizer(machine, value, name.value, node)
        return Known(found is not None)
    if isinstance(value, Known):
        return Known(hasattr(value.value, name.value))
    if isinstance(value, (Tensor, First)):
        objects.attribute(machine, value, name.value, node)
        return Known(True)
    raise machine.refusal("it asks for an attribute of what is not known", node)


# ---------------------------------------------------------------- text


@rule(str, builtins.format, builtins.repr)
def _text(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if len(args) == 1 and isinstance(args[0], Known) and type(args[0].value) is str:
        return args[0]
    found = compute(machine, args, node, (str,))
    if level_of(found) == Level.NUMBER:
        raise machine.refusal("it makes text of contents of a tensor", node)
    return found


@rule(warnings.warn)
def _warn(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return Known(None)


@rule(typing.cast)
def _cast(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return args[1]
