"""The statements `for`, `while`, `break` and `continue`."""

from __future__ import annotations

import ast
from collections.abc import Sequence as Seq

from . import calls, iteration
from .assignments import assign
from .expressions import used
from .forms import LOOPS, execute, form
from .loops import over_lanes, over_many, unrolled
from .machine import Machine
from .memory import merge
from .values import (
    Data,
    Grouped,
    Items,
    Known,
    Level,
    Many,
    Method,
    Sequence,
    Value,
    join,
    types_of,
)

#: The largest number of separate items for which a loop is unrolled.
UNROLLED = 16


@form(ast.Continue)
def _continue(machine: Machine, node: ast.Continue) -> None:
    loop = machine.loops[-1]
    loop.continues.append((machine.memory, machine.level, machine.branch(node)))
    machine.memory = None


@form(ast.Break)
def _break(machine: Machine, node: ast.Break) -> None:
    loop = machine.loops[-1]
    loop.breaks.append(machine.now)
    loop.level = max(loop.level, machine.level)
    machine.memory = None


def _set_in(node: ast.For | ast.While) -> frozenset[str]:
    """Return the variables that the target and the body of a loop set by name."""
    names: set[str] = set()
    targets: list[ast.AST] = [*node.body]
    if isinstance(node, ast.For):
        targets.append(node.target)
    for x in calls.stored(targets):
        if isinstance(x, ast.Name):
            names.add(x.id)
        elif isinstance(x, ast.FunctionDef):
            names.add(x.name)
    return frozenset(names)


def _for(machine: Machine, node: ast.For, rest: Seq[ast.stmt]) -> bool:
    """Walk a loop; return True if `rest`, the statements after it, was walked too.

    That happens if a lane may break off the loop: `rest` is walked once for each end.
    """
    value = used(machine, node.iter)

    def body(x: Value) -> None:
        assign(machine, node.target, x)
        execute(machine, node.body)

    if isinstance(value, Method) and isinstance(value.of, Grouped):
        grouped, with_keys = value.of, value.name.endswith("items")

        def turn() -> None:
            site = machine.site(node)
            key, lists = iteration.sorted_lists(machine, grouped, site)
            body(Items((key, lists)) if with_keys else lists)

        over_many(machine, turn, node, Level.UNIFORM, _set_in(node))
        _orelse(machine, node)
        return False
    items = iteration.spread(machine, value, machine.site(node), node.iter)

    if isinstance(items, Sequence):
        broken = over_lanes(machine, items, body, node, _set_in(node))
        if broken is None:
            _orelse(machine, node)
            return False
        if node.orelse:
            raise machine.refusal("it leaves a loop over lanes before its end", node)
        # whether some lane breaks off the loop is the same for all lanes
        execute(machine, rest)
        first = machine.memory
        machine.memory = broken
        execute(machine, rest)
        machine.memory = merge(first, machine.memory, Level.UNIFORM, None)
        return True
    if isinstance(items, list) and len(items) <= UNROLLED and not _breaks(node.body):
        unrolled(machine, items, body, node)
        _orelse(machine, node)
        return False
    if isinstance(items, list):
        item = items[0] if items else Known(None)
        for x in items[1:]:
            item = join(item, x, Level.UNIFORM)
        if isinstance(item, Known):
            item = Data(Level.UNIFORM, types_of(item))
        items = Many(item)
    each = items.item
    over_many(machine, lambda: body(each), node, items.level, _set_in(node))
    _orelse(machine, node)
    return False


def _orelse(machine: Machine, node: ast.For | ast.While) -> None:
    if node.orelse:
        if _breaks(node.body):
            raise machine.refusal("the else of a loop is not analysed", node)
        if machine.memory is not None:
            execute(machine, node.orelse)


def _breaks(body: Seq[ast.stmt]) -> bool:
    for x in body:
        for y in ast.walk(x):
            if isinstance(y, (ast.Break, ast.Continue)):
                return True
    return False


@form(ast.While)
def _while(machine: Machine, node: ast.While) -> None:
    level = Level.UNIFORM

    def body() -> None:
        nonlocal level
        test = used(machine, node.test)
        outcome, test_level = iteration.truth(machine, test, node.test)
        level = max(level, test_level)
        if outcome is False:
            machine.memory = None
            return
        execute(machine, node.body)

    before = machine.now.copy()
    over_many(machine, body, node, Level.UNIFORM, _set_in(node))
    if level != Level.UNIFORM:
        machine.memory = before
        over_many(machine, body, node, level, _set_in(node))
    _orelse(machine, node)


LOOPS[ast.For] = _for
