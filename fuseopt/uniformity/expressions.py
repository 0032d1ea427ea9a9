"""Expressions: a function for each form of the syntax; others are refused."""

from __future__ import annotations

import ast
import builtins
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from . import containers, functions, iteration, objects, tensors
from .forms import into
from .machine import Definition, Machine, usable
from .memory import Dict, List
from .values import (
    NUMBER,
    Closure,
    Count,
    Data,
    Items,
    Known,
    Level,
    Many,
    Ref,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
)

Form = Callable[[Machine, Any], Value]
FORMS: dict[type, Form] = {}
form = into(FORMS)


def evaluate(machine: Machine, node: ast.expr) -> Value:
    """Return the abstract value of an expression."""
    machine.spend(node)
    rule = FORMS.get(type(node))
    if rule is None:
        raise machine.refusal(f"a {type(node).__name__} is not analysed", node)
    return rule(machine, node)


def used(machine: Machine, node: ast.expr) -> Value:
    """Return the abstract value of an expression. Refuses one that may not be used."""
    return usable(machine, evaluate(machine, node), node)


# ---------------------------------------------------------------- names


@functools.cache
def _constant(value: Any, kind: type) -> Known:
    return Known(value)


@form(ast.Constant)
def _of_constant(machine: Machine, node: ast.Constant) -> Value:
    return Known(node.value)


@form(ast.Name)
def _name(machine: Machine, node: ast.Name) -> Value:
    name, frame = node.id, machine.frame
    mangled(machine, name, node)
    scope = machine.place(name)
    if scope is not None:
        value = machine.now.scopes[scope].get(name)
        if value is None:
            raise machine.refusal(f"{name} is unknown here", node)
        return value
    if name in frame.cells:
        return machine.world.value(frame.cells[name], name)
    if name in frame.globals:
        return machine.world.value(frame.globals[name], name)
    if hasattr(builtins, name):
        return Known(getattr(builtins, name))
    raise machine.refusal(f"{name} is unknown here", node)


@form(ast.NamedExpr)
def _named(machine: Machine, node: ast.NamedExpr) -> Value:
    value = used(machine, node.value)
    scope = machine.place(node.target.id)
    if scope is None:
        raise machine.refusal("it sets a variable that it did not make", node)
    machine.store(scope, node.target.id, value, node)
    return value


@form(ast.Attribute)
def _attribute(machine: Machine, node: ast.Attribute) -> Value:
    mangled(machine, node.attr, node)
    return objects.attribute(machine, used(machine, node.value), node.attr, node)


def mangled(machine: Machine, name: str, node: ast.AST) -> None:
    """Refuse private names (`__x`), which Python mangles within a class."""
    if name.startswith("__") and not name.endswith("__"):
        raise machine.refusal("a name that its class mangles is not analysed", node)


@form(ast.Subscript)
def _subscript(machine: Machine, node: ast.Subscript) -> Value:
    value = used(machine, node.value)
    return containers.item(machine, value, key(machine, node.slice), node)


def key(machine: Machine, node: ast.expr) -> Value:
    """Return the value of an index or a slice."""
    return used(machine, node)


@form(ast.Slice)
def _slice(machine: Machine, node: ast.Slice) -> Value:
    parts = [
        Known(None) if x is None else used(machine, x)
        for x in (node.lower, node.upper, node.step)
    ]
    if all(isinstance(x, Known) for x in parts):
        return Known(slice(*(x.value for x in parts)))  # type: ignore[attr-defined]
    level = max(containers.key_level(machine, x, node) for x in parts)
    return Data(level, frozenset({slice}))


# ---------------------------------------------------------------- arithmetic

_OPS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.FloorDiv: "floor_divide",
    ast.Mod: "remainder",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
    ast.BitAnd: "bitwise_and",
    ast.BitOr: "bitwise_or",
    ast.BitXor: "bitwise_xor",
    ast.LShift: "bitwise_left_shift",
    ast.RShift: "bitwise_right_shift",
}


@form(ast.BinOp)
def _binary(machine: Machine, node: ast.BinOp) -> Value:
    a, b = used(machine, node.left), used(machine, node.right)
    return operate(machine, type(node.op), a, b, node)


def operate(
    machine: Machine, op: type[ast.operator], a: Value, b: Value, node: ast.AST
) -> Value:
    """Return the value of `a op b`."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        if all(isinstance(x, Tensor) and x.number for x in (a, b)):
            return _number_too(a, b)
        result = tensors.aten(machine, _OPS[op], [a, b], {}, node)
        # an operand that may be a number instead of a tensor makes the result one, too
        optional_tensors = [
            x for x in (a, b) if isinstance(x, Tensor) and (x.number or x.plain)
        ]
        operands_of_data = [x for x in (a, b) if not isinstance(x, Tensor)]
        if (
            optional_tensors
            and len(optional_tensors) + len(operands_of_data) == 2
            and isinstance(result, Tensor)
        ):
            return Tensor(
                shared=result.shared,
                foreign=result.foreign,
                number=any(x.number for x in optional_tensors)
                or NUMBER in operands_of_data,
                plain=any(x.plain for x in optional_tensors),
            )
        return result
    if op is ast.Mult:
        for x, y in ((a, b), (b, a)):
            if isinstance(y, Count) and isinstance(x, Ref):
                return _repeated(machine, x, y, node)
    if isinstance(a, Items) and isinstance(b, Items) and op is ast.Add:
        return Items(a.items + b.items)
    if isinstance(a, Ref) or isinstance(b, Ref):
        return _lists(machine, op, a, b, node)
    if isinstance(a, Known) and isinstance(b, Known):
        if type(a.value) is str and type(b.value) is str and op is ast.Add:
            return Known(a.value + b.value)
        if type(a.value) is int and type(b.value) is int and op in (ast.Add, ast.Sub):
            return Known(a.value + b.value if op is ast.Add else a.value - b.value)
    return functions.compute(machine, [a, b], node, _types(op, a, b))


def _number_too(a: Value, b: Value) -> Value:
    assert isinstance(a, Tensor)
    assert isinstance(b, Tensor)
    return Tensor(
        shared=a.shared and b.shared, number=True, foreign=a.foreign or b.foreign
    )


def _types(op: type, a: Value, b: Value) -> tuple[type, ...]:
    """Return the possible types of `a op b` for plain data; empty: any."""
    types, other = types_of(a), types_of(b)
    if types is None or other is None:
        return ()
    both = types | other
    if both <= {int, bool} and op not in (ast.Div, ast.Pow):
        return (int,) if op not in (ast.BitAnd, ast.BitOr) or int in both else (bool,)
    if both <= {int, bool, float}:
        return (float, int) if float not in types and float not in other else (float,)
    if both == {str}:
        return (str,)
    return ()


def _repeated(machine: Machine, ref: Ref, count: Count, node: ast.AST) -> Value:
    """Evaluate `[x] * len(lanes)`: one item for each lane."""
    container = machine.container(ref, node)
    if (
        not isinstance(container, List)
        or container.items is None
        or len(container.items) != 1
    ):
        raise machine.refusal("it computes with the number of lanes", node)
    item = container.items[0]
    if level_of(item) != Level.UNIFORM and not (
        isinstance(item, Tensor) and item.shared
    ):
        raise machine.refusal("it gives all lanes one object", node)
    if count.lanes == "state":
        raise machine.refusal("it computes with the number of lanes", node)
    return machine.new(
        List(None, lanes=count.lanes, item=item, writer=machine.site(node))
    )


def _lists(machine: Machine, op: type, a: Value, b: Value, node: ast.AST) -> Value:
    if op is ast.Mult:
        ref, other = (a, b) if isinstance(a, Ref) else (b, a)
        assert isinstance(ref, Ref)
        container = machine.container(ref, node)
        level = containers.key_level(machine, other, node)
        if isinstance(container, List) and container.lanes is None:
            parts = [
                *(container.items or ()),
                *([container.many] if container.many else []),
            ]
            if parts:
                item = parts[0]
                for x in parts[1:]:
                    item = join(item, x, level)
                return machine.new(List(None, item, max(level, container.level)))
        raise machine.refusal("it repeats a value that differs between lanes", node)
    if op is ast.Add:
        values: list[Value] = []
        level = Level.UNIFORM
        exact = True
        for x in (a, b):
            if iteration.lanes_of(machine, x, node) is not None:
                raise machine.refusal("it concatenates lists of lanes", node)
            items = iteration.spread(machine, x, machine.site(node), node)
            if isinstance(items, list):
                values += items
            elif isinstance(items, Many):
                values.append(items.item)
                level, exact = max(level, items.level), False
        if exact:
            return machine.list_of(*values)
        item = values[0]
        for x in values[1:]:
            item = join(item, x, level)
        return machine.new(List(None, item, level))
    raise machine.refusal("it computes with a value that differs between lanes", node)


@form(ast.UnaryOp)
def _unary(machine: Machine, node: ast.UnaryOp) -> Value:
    value = used(machine, node.operand)
    if isinstance(node.op, ast.Not):
        outcome, level = iteration.truth(machine, value, node)
        if outcome is not None:
            return Known(not outcome)
        return Data(level, frozenset({bool}))
    if isinstance(value, Tensor):
        if value.number or value.plain:
            return replace(value, none=False, role="")
        return tensors.aten(machine, "neg", [value], {}, node)
    if isinstance(value, Known) and type(value.value) in (int, float):
        if isinstance(node.op, ast.USub):
            return Known(-value.value)
    return functions.compute(machine, [value], node, tuple(types_of(value) or ()))


@form(ast.BoolOp)
def _bool(machine: Machine, node: ast.BoolOp) -> Value:
    return _chain(machine, node, 0)


def _chain(machine: Machine, node: ast.BoolOp, k: int) -> Value:
    value = used(machine, node.values[k])
    if k == len(node.values) - 1:
        return value
    stops = isinstance(node.op, ast.Or)
    outcome, level = iteration.truth(machine, value, node.values[k])
    if outcome is not None:
        return value if outcome == stops else _chain(machine, node, k + 1)
    if isinstance(value, Count):
        value = Data(Level.UNIFORM, frozenset({int}))
    return machine.either(
        level, node.values[k], lambda: value, lambda: _chain(machine, node, k + 1)
    )


@form(ast.IfExp)
def _choice(machine: Machine, node: ast.IfExp) -> Value:
    test = used(machine, node.test)
    outcome, level = iteration.truth(machine, test, node.test)
    if outcome is not None:
        return evaluate(machine, node.body if outcome else node.orelse)
    return machine.either(
        level,
        node,
        lambda: evaluate(machine, node.body),
        lambda: evaluate(machine, node.orelse),
    )


# ---------------------------------------------------------------- displays


@form(ast.Tuple)
def _tuple(machine: Machine, node: ast.Tuple) -> Value:
    return Items(tuple(_items(machine, node.elts)))


@form(ast.List)
def _list(machine: Machine, node: ast.List) -> Value:
    return machine.list_of(*_items(machine, node.elts))


def _items(machine: Machine, nodes: list[ast.expr]) -> list[Value]:
    values: list[Value] = []
    for x in nodes:
        if isinstance(x, ast.Starred):
            value = used(machine, x.value)
            items = iteration.spread(machine, value, machine.site(x), x)
            if not isinstance(items, list):
                raise machine.refusal("it unpacks an unknown value", x)
            values += items
        else:
            values.append(used(machine, x))
    return values


@form(ast.Set)
def _set(machine: Machine, node: ast.Set) -> Value:
    items = [used(machine, x) for x in node.elts]
    for x in items:
        containers.key_level(machine, x, node)
    return Items(tuple(items))


@form(ast.Dict)
def _dict(machine: Machine, node: ast.Dict) -> Value:
    result = Dict()
    for k, v in zip(node.keys, node.values, strict=True):
        if k is None:
            value = used(machine, v)
            container = machine.container(value, v) if isinstance(value, Ref) else None
            if not isinstance(container, Dict) or container.other is not None:
                raise machine.refusal("it unpacks an unknown value", v)
            for name, item in container.items:
                result = result.put(name, item)
            continue
        name = used(machine, k)
        if not isinstance(name, Known):
            raise machine.refusal("it makes a dict with unknown keys", node)
        result = result.put(name.value, used(machine, v))
    return machine.new(result)


@form(ast.JoinedStr)
def _text(machine: Machine, node: ast.JoinedStr) -> Value:
    parts: list[Value] = []
    for x in node.values:
        if isinstance(x, ast.FormattedValue):
            value = used(machine, x.value)
            if x.format_spec is not None or x.conversion != -1:
                value = functions.compute(machine, [value], x, (str,))
            parts.append(value)
        else:
            parts.append(used(machine, x))
    if all(isinstance(x, Known) and type(x.value) in (str, int) for x in parts):
        return Known("".join(str(x.value) for x in parts))  # type: ignore[attr-defined]
    computed = functions.compute(machine, parts, node, (str,))
    if level_of(computed) == Level.NUMBER:
        raise machine.refusal("it formats tensor data as text", node)
    return computed


@form(ast.Lambda)
def _lambda(machine: Machine, node: ast.Lambda) -> Value:
    return define(machine, node)


def define(machine: Machine, node: ast.FunctionDef | ast.Lambda) -> Value:
    """Return the value of a `def` or a `lambda` of the step. Refuses generators."""
    for x in ast.walk(node):
        if isinstance(x, (ast.Yield, ast.YieldFrom, ast.Await)):
            raise machine.refusal("a generator is not analysed", x)
    defaults = tuple(used(machine, x) for x in node.args.defaults)
    words = tuple(
        (a.arg, used(machine, x))
        for a, x in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
        if x is not None
    )
    frames = (*machine.frame.outer, machine.frame)
    machine.definitions.append(Definition(node, frames, defaults, words))
    return Closure(len(machine.definitions) - 1)
