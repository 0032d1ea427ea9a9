"""Rules for functions without Python source: built-ins, `math`, torch besides ATen.

A rule takes the machine, the arguments and the call, and returns the abstract value of
the result. Calls of functions that have no rule are refused.
"""

from __future__ import annotations

import ast
import builtins
import math
import typing
import warnings
from collections.abc import Callable
from typing import Any

from . import iteration, objects, tensors
from .machine import Machine, usable
from .memory import List
from .values import (
    NUMERIC,
    PLAIN,
    Count,
    Data,
    First,
    Index,
    Items,
    Known,
    Level,
    Many,
    Optimizer,
    Ref,
    Sequence,
    Tensor,
    Value,
    level_of,
    types_of,
    uniform,
)

Args = list[Value]
Keywords = dict[str, Value]
Rule = Callable[[Machine, Args, Keywords, ast.AST], Value]
#: The function and its rule, by `id` of the function.
RULES: dict[int, tuple[Any, Rule]] = {}


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Make a decorator that registers a rule for some functions; None is left out."""

    def take(handler: Rule) -> Rule:
        for function in functions:
            if function is not None:
                RULES[id(function)] = function, handler
        return handler

    return take


def odd(value: Value) -> str:
    """Describe what differs between lanes."""
    if isinstance(value, Index):
        return "the position of a lane"
    if isinstance(value, Count):
        return "the number of lanes"
    return "a value that differs between lanes"


def compute(
    machine: Machine, args: list[Value], node: ast.AST, types: tuple[type, ...] = ()
) -> Value:
    """Return plain data computed from `args`; its level is the highest of theirs.

    `types`: the possible types of the result. Refuses arguments that are no plain data.
    """
    level = Level.UNIFORM
    numeric = True
    for value in args:
        usable(machine, value, node)
        numeric = numeric and _numbers(value)
        if isinstance(value, Tensor):
            # the function reads its contents
            if value.foreign:
                raise machine.refusal("two lists may have different lanes", node)
            level = Level.NUMBER
            continue
        if isinstance(value, Items):
            of_value: Level | None = level_of(compute(machine, list(value.items), node))
        elif isinstance(value, Many):
            of_value = level_of(compute(machine, [value.item], node))
            of_value = None if of_value is None else max(of_value, value.level)
        elif isinstance(value, Ref):
            of_value = _of_list(machine, value, node)
        else:
            of_value = level_of(value)
        if of_value is None or (
            isinstance(value, Known) and not isinstance(value.value, PLAIN)
        ):
            raise machine.refusal(f"it computes with {odd(value)}", node)
        level = max(level, of_value)
    if types:
        return Data(level, frozenset(types))
    return Data(level, NUMERIC if numeric else None)


def _numbers(value: Value) -> bool:
    """Is it a number, or several? Then a value computed from it is a number, too."""
    if isinstance(value, Items):
        return all(map(_numbers, value.items))
    types = types_of(value)
    return isinstance(value, Tensor) or (types is not None and types <= NUMERIC)


def _of_list(machine: Machine, value: Ref, node: ast.AST) -> Level | None:
    container = machine.container(value, node)
    if not isinstance(container, List) or container.lanes is not None:
        return None
    values = [
        *(container.items or ()),
        *([] if container.many is None else [container.many]),
    ]
    level = level_of(compute(machine, values, node))
    return None if level is None else max(level, container.level)


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
    outcome, level = iteration.truth(machine, args[0], node)
    return Known(outcome) if outcome is not None else Data(level, frozenset({bool}))


@rule(builtins.min, builtins.max)
def _bound(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if keywords.keys() - {"default"}:
        raise machine.refusal("it compares by a key function", node)
    if len(args) == 1:
        return _fold(machine, args[0], list(keywords.values()), node)
    return _of_all(machine, args, node)


@rule(builtins.sum, math.prod, math.fsum)
def _sum(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    return _fold(machine, args[0], [*args[1:], *keywords.values()], node)


def _fold(machine: Machine, iterable: Value, more: Args, node: ast.AST) -> Value:
    """Return the value of a reduction (`sum`, `max`) over an iterable and `more`
    operands.
    """
    if iteration.lanes_of(machine, iterable, node) is not None:
        raise machine.refusal("it computes a total over all lanes", node)
    items = iteration.spread(machine, iterable, machine.site(node), node)
    assert not isinstance(items, Sequence)
    if isinstance(items, list):
        return _of_all(machine, [*items, *more], node)
    result = _of_all(machine, [items.item, *more], node)
    level = level_of(result)
    return result if level is None else Data(max(level, items.level), types_of(result))


def _of_all(machine: Machine, args: Args, node: ast.AST) -> Value:
    computed = compute(machine, args, node)
    if any(isinstance(x, Tensor) for x in args):
        return _of_tensors(args)
    return computed


def _of_tensors(args: Args) -> Value:
    shared = all(isinstance(x, Tensor) and x.shared for x in args)
    foreign = any(isinstance(x, Tensor) and x.foreign for x in args)
    return Tensor(shared=shared, number=True, foreign=foreign)


@rule(builtins.any, builtins.all)
def _any(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    sequence = iteration.lanes_of(machine, args[0], node)
    if sequence is not None:
        iteration.truth(machine, sequence.item, node)
        return Data(Level.UNIFORM, frozenset({bool}))
    items = iteration.spread(machine, args[0], machine.site(node), node)
    if isinstance(items, Sequence):
        raise machine.refusal("it tests a list of lanes", node)
    values = items if isinstance(items, list) else [items.item]
    worst = Level.UNIFORM if isinstance(items, list) else items.level
    for x in values:
        level = iteration.truth(machine, x, node)[1]
        worst = max(worst, level)
    return Data(worst, frozenset({bool}))


# ---------------------------------------------------------------- attributes by name


@rule(builtins.getattr)
def _getattr(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:

    value, name = usable(machine, args[0], node), args[1]
    if not isinstance(name, Known) or type(name.value) is not str:
        raise machine.refusal("it reads an attribute with an unknown name", node)
    if isinstance(value, Optimizer):
        attribute = objects.of_optimizer(machine, value, name.value, node)
        if attribute is None:
            if len(args) > 2:
                return args[2]
            raise machine.refusal(f"the optimizer has no attribute {name.value}", node)
        return attribute
    return objects.attribute(machine, value, name.value, node)


@rule(builtins.hasattr)
def _hasattr(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:

    value, name = usable(machine, args[0], node), args[1]
    if not isinstance(name, Known) or type(name.value) is not str:
        raise machine.refusal("it tests for an attribute with an unknown name", node)
    if isinstance(value, Optimizer):
        if ("attribute", name.value) in machine.world.written:
            return uniform(bool)
        attribute = objects.of_optimizer(machine, value, name.value, node)
        return Known(attribute is not None)
    if isinstance(value, Known):
        return Known(objects.has(machine, value.value, name.value, node))
    if isinstance(value, (Tensor, First)):
        objects.attribute(machine, value, name.value, node)
        return Known(True)
    raise machine.refusal("it reads an attribute of an unknown object", node)


# ---------------------------------------------------------------- text


@rule(str, builtins.format, builtins.repr)
def _text(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if len(args) == 1 and isinstance(args[0], Known) and type(args[0].value) is str:
        return args[0]
    computed = compute(machine, args, node, (str,))
    if level_of(computed) == Level.NUMBER:
        raise machine.refusal("it formats tensor data as text", node)
    return computed


@rule(warnings.warn)
def _warn(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return Known(None)


@rule(typing.cast)
def _cast(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return args[1]
