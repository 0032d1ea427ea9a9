"""Statements that are neither assignments nor loops nor branches."""

from __future__ import annotations

import ast

from . import expressions, iteration
from .expressions import used
from .forms import form
from .machine import Machine
from .values import (
    PLAIN,
    Known,
    Value,
)


@form(ast.Pass, ast.Nonlocal)
def _pass(machine: Machine, node: ast.AST) -> None:
    pass


@form(ast.Expr)
def _expr(machine: Machine, node: ast.Expr) -> None:
    if not isinstance(node.value, ast.Constant):
        expressions.evaluate(machine, node.value)


@form(ast.Return)
def _return(machine: Machine, node: ast.Return) -> None:
    value: Value = Known(None)
    if node.value is not None:
        value = expressions.evaluate(machine, node.value)
    frame = machine.frame
    lane = machine.lane
    if lane is not None and lane.frame is frame:
        if not (isinstance(value, Known) and isinstance(value.value, PLAIN)):
            raise machine.refusal("the result of one lane ends a loop over lanes", node)
        lane.leaves.append((value, machine.now))
        machine.memory = None
        return
    loops = [x for x in machine.loops if x.frame is frame]
    level = max([machine.level, *(x.level for x in loops)])
    frame.returns.append((value, machine.memory, level))
    machine.memory = None


@form(ast.Raise)
def _raise(machine: Machine, node: ast.Raise) -> None:
    machine.memory = None


@form(ast.Assert)
def _assert(machine: Machine, node: ast.Assert) -> None:
    outcome, _ = iteration.truth(machine, used(machine, node.test), node.test)
    if outcome is False:
        machine.memory = None
