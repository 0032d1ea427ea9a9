"""Comparisons of plain data, of tensors, of identities, of lane counts with zero."""

from __future__ import annotations

import ast

import torch

from . import functions, iteration, tensors
from .expressions import form, used
from .machine import Machine
from .values import (
    NONE,
    PLAIN,
    Bound,
    Choice,
    Closure,
    Count,
    Data,
    First,
    Grouped,
    Held,
    Items,
    Known,
    Level,
    Many,
    Method,
    Optimizer,
    Ref,
    Sequence,
    State,
    Tensor,
    Value,
)

# ---------------------------------------------------------------- comparisons


@form(ast.Compare)
def _compare(machine: Machine, node: ast.Compare) -> Value:
    left = used(machine, node.left)
    results: list[Value] = []
    if len(node.ops) > 1 and any(isinstance(x, ast.NamedExpr) for x in ast.walk(node)):
        raise machine.refusal("an assignment within a comparison is not analysed", node)
    for op, comparator in zip(node.ops, node.comparators, strict=True):
        right = used(machine, comparator)
        results.append(_compared(machine, op, left, right, node))
        left = right
    if len(results) == 1:
        return results[0]
    if all(isinstance(x, Known) for x in results):
        return Known(all(x.value for x in results))  # type: ignore[attr-defined]
    return functions.compute(machine, results, node, (bool,))


def _compared(
    machine: Machine, op: ast.cmpop, a: Value, b: Value, node: ast.AST
) -> Value:
    if isinstance(op, (ast.In, ast.NotIn)):
        outcome = iteration.contains(machine, b, a, node)
        if isinstance(outcome, Known) and isinstance(op, ast.NotIn):
            return Known(not outcome.value)
        return outcome
    if isinstance(op, (ast.Is, ast.IsNot)):
        outcome = _same(machine, a, b, node)
        if isinstance(outcome, Known) and isinstance(op, ast.IsNot):
            return Known(not outcome.value)
        return outcome
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Count):
            return _counted(machine, op, x, y, swapped=x is b, node=node)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        for x in (a, b):
            if isinstance(x, Tensor) and (x.number or x.plain):
                operands = tensors.Operands(machine, node)
                operands.take(a)
                operands.take(b)
                return Tensor(
                    shared=operands.shared, number=True, foreign=operands.foreign
                )
        return tensors.aten(machine, "gt", [a, b], {}, node)
    if isinstance(a, Known) and isinstance(b, Known):
        if isinstance(op, (ast.Eq, ast.NotEq)) and _exact(a) and _exact(b):
            return Known((a.value == b.value) == isinstance(op, ast.Eq))
        if not (isinstance(a.value, PLAIN) and isinstance(b.value, PLAIN)):
            raise machine.refusal("it compares objects", node)
    return functions.compute(machine, [a, b], node, (bool,))


def _exact(x: Known) -> bool:
    return isinstance(x.value, (*PLAIN, type))


def _same(machine: Machine, a: Value, b: Value, node: ast.AST) -> Value:
    """`a is b`."""
    for x, y in ((a, b), (b, a)):
        if isinstance(y, Known) and (
            y.value is None or type(y.value) is bool or y.value is Ellipsis
        ):
            if isinstance(x, Known):
                return Known(x.value is y.value)
            if isinstance(x, Data):
                if x.types is not None and type(y.value) not in x.types:
                    return Known(False)
                return Data(x.level, frozenset({bool}))
            if isinstance(x, Tensor):
                if y.value is None and not (x.none or x.plain):
                    return Known(False)
                return Data(Level.KIND, frozenset({bool}))
            if isinstance(x, First):
                return Data(Level.UNIFORM, frozenset({bool}))
            if isinstance(
                x,
                (
                    Items,
                    Ref,
                    Held,
                    State,
                    Optimizer,
                    Grouped,
                    Closure,
                    Bound,
                    Method,
                    Many,
                    Sequence,
                    Choice,
                ),
            ):
                return Known(False)
    for x, y in ((a, b), (b, a)):
        if isinstance(x, Known) and type(x.value) is torch.dtype:
            if isinstance(y, Data) and y.types is not None and y.level < Level.NUMBER:
                if y.types <= {torch.dtype, NONE}:
                    return Data(y.level, frozenset({bool}))
    if isinstance(a, Known) and isinstance(b, Known):
        if callable(a.value):
            return Known(a.value is b.value)
    raise machine.refusal("it compares the identity of two objects", node)


def _counted(
    machine: Machine,
    op: ast.cmpop,
    count: Count,
    other: Value,
    swapped: bool,
    node: ast.AST,
) -> Value:
    """Evaluate a comparison with a count of lanes, which may only test for zero."""
    if isinstance(other, Count) and other.lanes == count.lanes:
        return Data(Level.UNIFORM, frozenset({bool}))
    number = other.value if isinstance(other, Known) else None
    zero = (ast.Eq, ast.NotEq, ast.Gt, ast.LtE)
    if swapped:
        zero = (ast.Eq, ast.NotEq, ast.Lt, ast.GtE)  # type: ignore[assignment]
    if type(number) is int and number == 0 and isinstance(op, zero):
        return Data(Level.UNIFORM, frozenset({bool}))
    raise machine.refusal("it computes with the number of lanes", node)
