"""The statements `if`, `try` and `with`."""

from __future__ import annotations

import ast
from dataclasses import replace

from . import calls, iteration
from .expressions import used
from .forms import execute, form
from .machine import Machine
from .memory import List, Memory, merge
from .values import (
    NONE,
    Carried,
    Data,
    Known,
    Level,
    Ref,
    Unusable,
    level_of,
    types_of,
)


@form(ast.If)
def _if(machine: Machine, node: ast.If) -> None:
    if _first_sets(machine, node):
        return
    test = used(machine, node.test)
    outcome, level = iteration.truth(machine, test, node.test)
    if outcome is not None:
        execute(machine, node.body if outcome else node.orelse)
        return
    before = machine.now.copy()
    with machine.under(level):
        _fill(machine, node.test, True)
        execute(machine, node.body)
        then = machine.memory
        machine.memory = before
        _fill(machine, node.test, False)
        execute(machine, node.orelse)
    machine.memory = merge(then, machine.memory, level, machine.branch(node))


def _fill(machine: Machine, test: ast.expr, holds: bool) -> None:
    """Mark a list of lanes as not empty, in the branch where a test of it holds."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    if holds and isinstance(test, ast.Name):
        value = used(machine, test)
        if isinstance(value, Ref):
            contents = machine.now.heap[value.number]
            if isinstance(contents, List) and contents.lanes is not None:
                machine.now.heap[value.number] = replace(contents, filled=True)


def _first_sets(machine: Machine, node: ast.If) -> bool:
    """Walk `if x is None: x = ...` in a loop over lanes, where the first lane sets x.

    The first lane leads its kind, and the value follows from the kind. So the value
    agrees between the step of all lanes and that of the leading ones. Returns False if
    `node` has another form.
    """
    test = node.test
    if not (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and len(test.ops) == 1
        and isinstance(test.ops[0], ast.Is)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
        and not node.orelse
        and len(node.body) == 1
        and isinstance(node.body[0], ast.Assign)
        and len(node.body[0].targets) == 1
    ):
        return False
    target = node.body[0].targets[0]
    if not isinstance(target, ast.Name) or target.id != test.left.id:
        return False
    scope = machine.place(target.id)
    if scope is None:
        return False
    carried = machine.now.scopes[scope].get(target.id)
    if not isinstance(carried, Carried) or carried.before is None:
        return False
    before = types_of(carried.before)
    if level_of(carried.before) != Level.UNIFORM or before is None:
        return False
    value = used(machine, node.body[0].value)
    types = types_of(value)
    if level_of(value) not in (Level.UNIFORM, Level.KIND) or types is None:
        raise machine.refusal(
            "the first lane sets a value that other lanes read", node.body[0]
        )
    if NONE in types:
        raise machine.refusal(
            "the first lane sets a value that other lanes read", node.body[0]
        )
    result = Data(Level.UNIFORM, (before - {NONE}) | types)
    machine.store(scope, target.id, result, target)
    if machine.lane is not None:
        machine.lane.firsts[scope, target.id] = machine.site(target)
        machine.firsts = True
    return True


_WORK = (
    ast.Call,
    ast.For,
    ast.While,
    ast.ListComp,
    ast.GeneratorExp,
    ast.DictComp,
    ast.SetComp,
    ast.Return,
    ast.Break,
    ast.Continue,
    ast.Delete,
    ast.With,
)


@form(ast.Try)
def _try(machine: Machine, node: ast.Try) -> None:
    caught = [x for x in node.handlers if not isinstance(x.body[-1], ast.Raise)]
    failed: Memory | None = None
    if caught:
        # plain arithmetic fails for all lanes or for none
        if machine.lane is not None:
            raise machine.refusal("a try block may fail for some lanes", caught[0])
        for part in node.body:
            for x in ast.walk(part):
                if isinstance(x, _WORK):
                    raise machine.refusal("a try block may fail half way", x)
        failed = machine.now.copy()
        for x in calls.stored(node.body):
            if isinstance(x, ast.Name):
                scope = machine.place(x.id)
                if scope is not None:
                    bad = Unusable(f"{x.id} may be set before a failure, or not")
                    failed.scopes[scope][x.id] = bad
    if node.finalbody:
        for x in (y for part in node.body for y in ast.walk(part)):
            if isinstance(x, (ast.Return, ast.Break, ast.Continue)):
                raise machine.refusal("it leaves a try block before its end", x)
    execute(machine, node.body)
    if machine.memory is not None:
        execute(machine, node.orelse)
    for handler in caught:
        assert failed is not None
        completed, machine.memory = machine.memory, failed.copy()
        if handler.name is not None:
            raise machine.refusal("it reads the exception that it caught", handler)
        execute(machine, handler.body)
        machine.memory = merge(completed, machine.memory, Level.UNIFORM, None)
    if node.finalbody and machine.memory is not None:
        execute(machine, node.finalbody)


@form(ast.With)
def _with(machine: Machine, node: ast.With) -> None:
    for item in node.items:
        call = item.context_expr
        if item.optional_vars is not None or not isinstance(call, ast.Call):
            raise machine.refusal("it enters an unknown context manager", call)
        function = used(machine, call.func)
        if not isinstance(function, Known) or function.value not in calls.CONTEXTS:
            raise machine.refusal("it enters an unknown context manager", call)
        for x in call.args:
            if level_of(used(machine, x)) != Level.UNIFORM:
                raise machine.refusal("it enters an unknown context manager", call)
    execute(machine, node.body)
