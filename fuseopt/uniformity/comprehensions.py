"""Comprehensions and `filter`: loops that create a list, in their own scope."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from . import expressions, functions, iteration, stores
from .assignments import assign
from .expressions import used
from .loop_statements import UNROLLED
from .loops import over_lanes, over_many, unrolled
from .machine import Frame, Machine
from .memory import Dict, merge
from .values import Data, Known, Level, Many, Sequence, Value, join, types_of


@expressions.form(ast.ListComp, ast.GeneratorExp, ast.SetComp)
def _list(machine: Machine, node: Any) -> Value:
    result = machine.list_of()

    def add() -> None:
        value = used(machine, node.elt)
        stores.append(machine, result, value, node.elt)

    _go(machine, node, add)
    if isinstance(node, ast.SetComp):
        if iteration.lanes_of(machine, result, node) is not None:
            raise machine.refusal("it makes a set of lanes", node)
    return result


@expressions.form(ast.DictComp)
def _dict(machine: Machine, node: ast.DictComp) -> Value:
    result = machine.new(Dict())

    def add() -> None:
        key = used(machine, node.key)
        stores.store_ref(machine, result, key, used(machine, node.value), node)

    _go(machine, node, add)
    return result


def _go(machine: Machine, node: Any, add: Callable[[], None]) -> None:
    # the first iterable is evaluated in the enclosing scope
    first = used(machine, node.generators[0].iter)
    frame = machine.frame
    names = frozenset(
        x.id
        for g in node.generators
        for x in ast.walk(g.target)
        if isinstance(x, ast.Name)
    )
    outer = (*frame.outer, frame)
    inner = Frame(
        frame.source,
        machine.scope(),
        names,
        frame.globals,
        frame.cells,
        outer,
        frame.owner,
        frame.first,
    )
    machine.frames.append(inner)
    try:
        _generate(machine, node, 0, add, first)
    finally:
        machine.frames.pop()
    if machine.memory is not None:
        machine.memory.scopes.pop(inner.scope, None)


def _generate(
    machine: Machine,
    node: Any,
    k: int,
    add: Callable[[], None],
    value: Value | None = None,
) -> None:
    if k == len(node.generators):
        add()
        return
    generator = node.generators[k]
    if generator.is_async:
        raise machine.refusal("a coroutine is not analysed", node)
    if value is None:
        value = used(machine, generator.iter)
    items = iteration.spread(machine, value, machine.site(generator), generator.iter)

    def body(x: Value) -> None:
        assign(machine, generator.target, x)
        _filter(machine, generator.ifs, lambda: _generate(machine, node, k + 1, add))

    if isinstance(items, Sequence):
        over_lanes(machine, items, body, generator, frozenset())
        return
    if isinstance(items, list) and len(items) <= UNROLLED:
        unrolled(machine, items, body, generator)
        return
    if isinstance(items, list):
        item = items[0]
        for x in items[1:]:
            item = join(item, x, Level.UNIFORM)
        if isinstance(item, Known):
            item = Data(Level.UNIFORM, types_of(item))
        items = Many(item)
    each = items.item
    over_many(machine, lambda: body(each), generator, items.level, frozenset())


def _filter(machine: Machine, tests: list[ast.expr], then: Callable[[], None]) -> None:
    if not tests:
        then()
        return
    test = tests[0]
    outcome, level = iteration.truth(machine, used(machine, test), test)
    if outcome is False:
        return
    before = machine.now.copy()
    with machine.under(level):
        _filter(machine, tests[1:], then)
    if outcome is None:
        machine.memory = merge(machine.memory, before, level, machine.branch(test))


@functions.rule(filter)
def _filtered(machine: Machine, args: Any, _: Any, node: ast.AST) -> Value:
    """Evaluate `filter(test, lanes)` as a list with a condition."""
    sequence = iteration.lanes_of(machine, args[1], node)
    if sequence is None:
        raise machine.refusal("it filters a list of something besides lanes", node)
    selected = machine.list_of()

    def body(x: Value) -> None:
        test = args[0]
        test_value: Value = x
        if test != Known(None):
            test_value = machine.call(machine, test, [x], {}, node)
        outcome, level = iteration.truth(machine, test_value, node)
        if outcome is False:
            return
        before = machine.now.copy()
        stores.append(machine, selected, x, node)
        if outcome is None:
            machine.memory = merge(machine.memory, before, level, machine.branch(node))

    over_lanes(machine, sequence, body, node, frozenset())
    return selected
