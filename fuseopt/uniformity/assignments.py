"""Assignments to variables, items and attributes; `del`, `def` and `import`."""

from __future__ import annotations

import ast
import sys
from typing import Any

from . import expressions, iteration, methods, objects, stores
from .expressions import used
from .forms import form
from .machine import Machine, usable
from .memory import List
from .values import (
    Carried,
    Closure,
    Gathered,
    Known,
    Level,
    Many,
    Optimizer,
    Ref,
    Sequence,
    Tensor,
    Unusable,
    Value,
    level_of,
    types_of,
)


@form(ast.Assign)
def _assign(machine: Machine, node: ast.Assign) -> None:
    if len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        if _gathers(machine, node.targets[0], node.value):
            return
    value = expressions.evaluate(machine, node.value)
    for target in node.targets:
        assign(machine, target, value)


@form(ast.AnnAssign)
def _annotated(machine: Machine, node: ast.AnnAssign) -> None:
    if node.value is not None:
        assign(machine, node.target, expressions.evaluate(machine, node.value))


def assign(machine: Machine, target: ast.expr, value: Value) -> None:
    """Set a variable, an item or an attribute."""
    if isinstance(target, ast.Name):
        expressions.mangled(machine, target.id, target)
        scope = machine.place(target.id)
        if scope is None:
            raise machine.refusal("it changes a variable that it did not make", target)
        machine.store(scope, target.id, value, target)
    elif isinstance(target, (ast.Tuple, ast.List)):
        _unpack(machine, target, value)
    elif isinstance(target, ast.Subscript):
        container = used(machine, target.value)
        key = expressions.key(machine, target.slice)
        stores.store_item(machine, container, key, value, target)
    elif isinstance(target, ast.Attribute):
        _set_attribute(machine, target, value)
    else:
        raise machine.refusal(f"a {type(target).__name__} is not analysed", target)


def _unpack(machine: Machine, target: ast.Tuple | ast.List, value: Value) -> None:
    usable(machine, value, target)
    names = target.elts
    stars = [k for k, x in enumerate(names) if isinstance(x, ast.Starred)]
    if iteration.lanes_of(machine, value, target) is not None:
        raise machine.refusal("it indexes lanes by position", target)
    items = iteration.spread(machine, value, machine.site(target), target)
    assert not isinstance(items, Sequence)
    if isinstance(items, Many):
        for x in names:
            if isinstance(x, ast.Starred):
                starred = machine.new(List(None, items.item, items.level))
                assign(machine, x.value, starred)
            else:
                assign(machine, x, items.item)
        return
    if stars:
        first = stars[0]
        last = len(items) - (len(names) - first - 1)
        if last < first:
            raise machine.refusal("an index is out of range", target)
        for x, y in zip(names[:first], items[:first], strict=True):
            assign(machine, x, y)
        star = names[first]
        assert isinstance(star, ast.Starred)
        assign(machine, star.value, machine.list_of(*items[first:last]))
        for x, y in zip(names[first + 1 :], items[last:], strict=True):
            assign(machine, x, y)
        return
    if len(items) != len(names):
        raise machine.refusal("an index is out of range", target)
    for x, y in zip(names, items, strict=True):
        assign(machine, x, y)


def _set_attribute(machine: Machine, target: ast.Attribute, value: Value) -> None:
    owner = used(machine, target.value)
    expressions.mangled(machine, target.attr, target)
    if isinstance(owner, Optimizer):
        if target.attr in ("state", "param_groups", "__class__", "__dict__"):
            raise machine.refusal("it replaces an object of the optimizer", target)
        for c in machine.world.kind.__mro__:
            if hasattr(vars(c).get(target.attr), "__set__"):
                raise machine.refusal(f"{target.attr} is set by a function", target)
        objects.write(machine, ("attribute", target.attr), value, target)
        return
    raise machine.refusal(
        "it sets an attribute of an object other than the optimizer", target
    )


@form(ast.AugAssign)
def _augmented(machine: Machine, node: ast.AugAssign) -> None:
    target = node.target
    if isinstance(target, ast.Name):
        if isinstance(node.op, (ast.BitOr, ast.BitAnd)):
            operation = "or" if isinstance(node.op, ast.BitOr) else "and"
            if _gather(machine, target, operation, node.value):
                return
        before = expressions.evaluate(machine, _read(target))
        value = used(machine, node.value)
        if isinstance(before, (Carried, Unusable)):
            why = f"{target.id} counts lanes"
            assign(machine, target, Unusable(why))
            return
        usable(machine, before, target)
        if isinstance(before, Ref) and isinstance(node.op, ast.Add):
            methods.method(machine, before, "extend", [value], {}, node)
            return
        result = expressions.operate(machine, type(node.op), before, value, node)
        if isinstance(before, Tensor):
            machine.effects += 1
        if isinstance(before, Tensor) and isinstance(result, Tensor):
            result = before if not result.number else result
        assign(machine, target, result)
        return
    load = _read(target)
    before = used(machine, load)
    value = used(machine, node.value)
    result = expressions.operate(machine, type(node.op), before, value, node)
    machine.effects += 1
    if isinstance(before, Tensor) and not before.plain and isinstance(result, Tensor):
        # in place: the container or the object keeps the same tensor
        if isinstance(target, ast.Attribute):
            return
        result = before
    assign(machine, target, result)


def _read(target: ast.expr) -> ast.expr:
    """Return the expression that reads an assignment target."""
    if isinstance(target, ast.Name):
        reading: ast.expr = ast.Name(target.id, ast.Load())
    elif isinstance(target, ast.Attribute):
        reading = ast.Attribute(target.value, target.attr, ast.Load())
    else:
        assert isinstance(target, ast.Subscript)
        reading = ast.Subscript(target.value, target.slice, ast.Load())
    return ast.copy_location(reading, target)


def _gathers(machine: Machine, target: ast.Name, value: ast.expr) -> bool:
    """Walk `x = x or ...` in a loop over lanes; return False for other assignments."""
    if isinstance(value, ast.BoolOp) and len(value.values) == 2:
        operation = "or" if isinstance(value.op, ast.Or) else "and"
        a, b = value.values
        for x, y in ((a, b), (b, a)):
            if isinstance(x, ast.Name) and x.id == target.id:
                return _gather(machine, target, operation, y)
    return False


def _gather(
    machine: Machine, target: ast.Name, operation: str, value: ast.expr
) -> bool:
    """Walk `x |= value`, `x &= value` over lanes: order and number do not matter.

    Returns False if the variable is not one that lanes gather in.
    """
    scope = machine.place(target.id)
    if scope is None:
        return False
    before = machine.now.scopes[scope].get(target.id)
    types_: frozenset[type] | None
    if isinstance(before, Carried):
        if before.before is None or level_of(before.before) != Level.UNIFORM:
            return False
        types_ = types_of(before.before)
    elif isinstance(before, Gathered) and before.operation == operation:
        types_ = before.types
    else:
        return False
    operand = used(machine, value)
    level, types = level_of(operand), types_of(operand)
    if level not in (Level.UNIFORM, Level.KIND) or types_ is None or types is None:
        raise machine.refusal("it accumulates an unknown value over lanes", value)
    if not (types_ | types) <= {bool}:
        raise machine.refusal("it accumulates an unknown value over lanes", value)
    if operand == Known(operation == "and"):
        return True  # the assignment changes nothing
    machine.store(scope, target.id, Gathered(operation, types_ | types), target)
    return True


@form(ast.Delete)
def _delete(machine: Machine, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            scope = machine.place(target.id)
            if scope is None:
                raise machine.refusal(
                    "it changes a variable that it did not make", target
                )
            machine.store(scope, target.id, Unusable(f"{target.id} is deleted"), target)
        else:
            raise machine.refusal(
                "it deletes an object that may belong to a lane", target
            )


@form(ast.FunctionDef)
def _define(machine: Machine, node: ast.FunctionDef) -> None:
    if node.decorator_list:
        raise machine.refusal("a function has an unknown decorator", node)
    scope = machine.place(node.name)
    assert scope is not None
    closure: Value = expressions.define(machine, node)
    assert isinstance(closure, Closure)
    machine.store(scope, node.name, closure, node)


@form(ast.Import, ast.ImportFrom)
def _import(machine: Machine, node: ast.Import | ast.ImportFrom) -> None:
    for name in node.names:
        if isinstance(node, ast.Import):
            bare = name.name if name.asname else name.name.partition(".")[0]
            imported: Any = sys.modules.get(bare)
            if name.name not in sys.modules:
                imported = None
        else:
            module = sys.modules.get(node.module or "")
            imported = None if node.level else getattr(module, name.name, None)
        if imported is None:
            raise machine.refusal("it imports an unknown module", node)
        bound = name.asname or name.name.partition(".")[0]
        scope = machine.place(bound)
        assert scope is not None
        machine.store(scope, bound, machine.world.value(imported, bound), node)
