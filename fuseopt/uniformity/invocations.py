"""Call expressions: their arguments, generators among them, `super()` and `next()`."""

from __future__ import annotations

import ast

from . import calls, containers, iteration, tensors
from .expressions import evaluate, form, used
from .machine import Frame, Machine
from .memory import Dict
from .values import (
    Grouped,
    Items,
    Known,
    Level,
    Many,
    Method,
    Optimizer,
    Ref,
    Sequence,
    Tensor,
    Value,
    join,
    level_of,
)

# ---------------------------------------------------------------- calls


@form(ast.Call)
def _call(machine: Machine, node: ast.Call) -> Value:
    if isinstance(node.func, ast.Name) and node.func.id == "super":
        if machine.place("super") is None and "super" not in machine.frame.globals:
            return _super(machine, node)
    function = used(machine, node.func)
    args: list[Value] = []
    if isinstance(function, Known) and node.args:
        if function.value is next:
            return _next(machine, node)
        if function.value is zip and isinstance(node.args[0], ast.Starred):
            columns = _columns(machine, node)
            if columns is not None:
                return columns
    for x in node.args:
        if isinstance(x, ast.Starred):
            args += _starred(machine, x, function)
        elif isinstance(x, ast.GeneratorExp):
            args.append(_generator(machine, x, function, len(node.args)))
        else:
            args.append(used(machine, x))
    keywords: dict[str, Value] = {}
    for word in node.keywords:
        value = used(machine, word.value)
        if word.arg is None:
            if not isinstance(value, Ref):
                raise machine.refusal("it unpacks an unknown value", node)
            container = machine.container(value, node)
            if not isinstance(container, Dict) or container.other is not None:
                raise machine.refusal("it unpacks an unknown value", node)
            keywords.update({k: v for k, v in container.items if isinstance(k, str)})
        else:
            keywords[word.arg] = value
    return calls.call(machine, function, args, keywords, node)


def _next(machine: Machine, node: ast.Call) -> Value:
    """Evaluate `next(...)` of a generator expression or `iter(...)`: the first item.

    For lanes, this is the item of the first lane.
    """
    argument = node.args[0]
    if isinstance(argument, ast.GeneratorExp):
        value = evaluate(machine, argument)
    elif (
        isinstance(argument, ast.Call)
        and used(machine, argument.func) == Known(iter)
        and len(argument.args) == 1
    ):
        value = used(machine, argument.args[0])
    else:
        raise machine.refusal("the position of an iterator is unknown", node)
    result: Value
    lanes = iteration.lanes_of(machine, value, node)
    if lanes is not None:
        result = containers.first_of(machine, lanes.item, node)
    elif isinstance(value, Method) and isinstance(value.of, Grouped):
        key, lists = iteration.sorted_lists(machine, value.of, machine.site(node))
        result = Items((key, lists)) if value.name.endswith("items") else lists
    else:
        items = iteration.spread(machine, value, machine.site(node), node)
        if not isinstance(items, list) or not items:
            raise machine.refusal("it takes the first item of an unknown value", node)
        result = items[0]
    if len(node.args) > 1:
        result = join(result, used(machine, node.args[1]), Level.UNIFORM)
    return result


def _columns(machine: Machine, node: ast.Call) -> Value | None:
    """`zip(*rows)` with one row for each lane: the columns, as sequences of lanes."""
    if len(node.args) != 1 or node.keywords:
        return None
    star = node.args[0]
    assert isinstance(star, ast.Starred)
    value = used(machine, star.value)
    sequence = iteration.lanes_of(machine, value, node)
    if sequence is None or not isinstance(sequence.item, Items):
        return None
    return Items(tuple(Sequence(sequence.lanes, x) for x in sequence.item.items))


_EATERS = (any, all, sum, min, max, list, tuple, sorted, set)


def _generator(
    machine: Machine, node: ast.GeneratorExp, function: Value, count: int
) -> Value:
    """Evaluate a generator expression that the call exhausts at once; refuse others."""
    eats = isinstance(function, Known) and function.value in _EATERS
    joins = isinstance(function, Method) and function.name in ("join", "extend")
    if not (eats or joins):
        raise machine.refusal("the consumer of a generator is unknown", node)
    return evaluate(machine, node)


def _starred(machine: Machine, node: ast.Starred, function: Value) -> list[Value]:
    value = used(machine, node.value)
    if level_of(value) in (Level.UNIFORM, Level.KIND) or isinstance(value, Many):
        # a shape that is spread as the arguments of a call of torch
        if isinstance(function, Method) and isinstance(function.of, Tensor):
            return [value]
        if isinstance(function, Known) and tensors.is_aten(function.value):
            return [value]
    items = iteration.spread(machine, value, machine.site(node), node)
    if not isinstance(items, list):
        raise machine.refusal("it unpacks an unknown value", node)
    return items


def _super(machine: Machine, node: ast.Call) -> Value:
    frame: Frame = machine.frame
    if node.args or frame.owner is None or frame.first != Optimizer():
        raise machine.refusal(
            "it calls super() of an object other than the optimizer", node
        )
    return Optimizer(frame.owner)
