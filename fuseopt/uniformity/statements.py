"""Statements, and loops: over lanes, over what is known, over anything else."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from . import calls, containers, expressions, iteration, methods, objects
from .expressions import used
from .loops import over_lanes, over_many, unrolled
from .machine import Machine, Raises, usable
from .memory import List, Memory, merge
from .values import (
    NONE,
    PLAIN,
    Bad,
    Carried,
    Closure,
    Data,
    Gathered,
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
    types_of,
)

Form = Callable[[Machine, Any], None]
FORMS: dict[type, Form] = {}
#: A loop settles after so many turns, or is refused.
TURNS = 12
#: So many known items are gone through one by one.
UNROLLED = 16


def form(*kinds: type) -> Callable[[Form], Form]:
    """Say how some forms of the syntax are taken."""

    def take(made: Form) -> Form:
        for kind in kinds:
            FORMS[kind] = made
        return made

    return take


def execute(machine: Machine, body: Seq[ast.stmt]) -> None:
    """Go through statements; afterwards `memory` is None if nobody gets there."""
    for k, node in enumerate(body):
        if machine.memory is None:
            return
        machine.spend(node)
        made = FORMS.get(type(node))
        if made is None:
            raise machine.refusal(f"a {type(node).__name__} is not analysed", node)
        try:
            if isinstance(node, ast.For):
                if _broken_off(machine, node, body[k + 1 :]):
                    return
            else:
                made(machine, node)
        except Raises:
            machine.memory = None


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
            raise machine.refusal("what one lane gives ends a loop over lanes", node)
        lane.leaves.append((value, machine.now))
        machine.memory = None
        return
    own = [x for x in machine.loops if x.frame is frame]
    level = max([machine.level, *(x.level for x in own)])
    frame.returns.append((value, machine.memory, level))
    machine.memory = None


@form(ast.Raise)
def _raise(machine: Machine, node: ast.Raise) -> None:
    machine.memory = None


@form(ast.Assert)
def _assert(machine: Machine, node: ast.Assert) -> None:
    found, _ = iteration.truth(machine, used(machine, node.test), node.test)
    if found is False:
        machine.memory = None


# ---------------------------------------------------------------- assignments


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
            raise machine.refusal("it changes what is not its own", target)
        machine.store(scope, target.id, value, target)
    elif isinstance(target, (ast.Tuple, ast.List)):
        _unpack(machine, target, value)
    elif isinstance(target, ast.Subscript):
        held = used(machine, target.value)
        key = expressions.key(machine, target.slice)
        containers.store_item(machine, held, key, value, target)
    elif isinstance(target, ast.Attribute):
        _set_attribute(machine, target, value)
    else:
        raise machine.refusal(f"a {type(target).__name__} is not analysed", target)


def _unpack(machine: Machine, target: ast.Tuple | ast.List, value: Value) -> None:
    usable(machine, value, target)
    names = target.elts
    stars = [k for k, x in enumerate(names) if isinstance(x, ast.Starred)]
    if iteration.lanes_of(machine, value, target) is not None:
        raise machine.refusal("it takes lanes by their places", target)
    items = iteration.spread(machine, value, machine.site(target), target)
    assert not isinstance(items, Sequence)
    if isinstance(items, Many):
        for x in names:
            if isinstance(x, ast.Starred):
                rest = machine.new(List(None, items.item, items.level))
                assign(machine, x.value, rest)
            else:
                assign(machine, x, items.item)
        return
    if stars:
        first = stars[0]
        last = len(items) - (len(names) - first - 1)
        if last < first:
            raise machine.refusal("there are not so many items", target)
        for x, y in zip(names[:first], items[:first], strict=True):
            assign(machine, x, y)
        star = names[first]
        assert isinstance(star, ast.Starred)
        assign(machine, star.value, machine.list_of(*items[first:last]))
        for x, y in zip(names[first + 1 :], items[last:], strict=True):
            assign(machine, x, y)
        return
    if len(items) != len(names):
        raise machine.refusal("there are not so many items", target)
    for x, y in zip(names, items, strict=True):
        assign(machine, x, y)


def _set_attribute(machine: Machine, target: ast.Attribute, value: Value) -> None:
    held = used(machine, target.value)
    expressions.mangled(machine, target.attr, target)
    if isinstance(held, Optimizer):
        if target.attr in ("state", "param_groups", "__class__", "__dict__"):
            raise machine.refusal("it replaces what belongs to the optimizer", target)
        for c in machine.world.kind.__mro__:
            if hasattr(vars(c).get(target.attr), "__set__"):
                raise machine.refusal(f"{target.attr} is set by a function", target)
        objects.write(machine, ("attribute", target.attr), value, target)
        return
    raise machine.refusal("it sets an attribute of what is not the optimizer", target)


@form(ast.AugAssign)
def _augmented(machine: Machine, node: ast.AugAssign) -> None:
    target = node.target
    if isinstance(target, ast.Name):
        if isinstance(node.op, (ast.BitOr, ast.BitAnd)):
            operation = "or" if isinstance(node.op, ast.BitOr) else "and"
            if _gather(machine, target, operation, node.value):
                return
        known = expressions.evaluate(machine, _read(target))
        value = used(machine, node.value)
        if isinstance(known, (Carried, Bad)):
            why = f"{target.id} counts lanes"
            assign(machine, target, Bad(why))
            return
        usable(machine, known, target)
        if isinstance(known, Ref) and isinstance(node.op, ast.Add):
            methods.method(machine, known, "extend", [value], {}, node)
            return
        result = expressions.operate(machine, type(node.op), known, value, node)
        if isinstance(known, Tensor):
            machine.effects += 1
        if isinstance(known, Tensor) and isinstance(result, Tensor):
            result = known if not result.number else result
        assign(machine, target, result)
        return
    read = _read(target)
    known = used(machine, read)
    value = used(machine, node.value)
    result = expressions.operate(machine, type(node.op), known, value, node)
    machine.effects += 1
    if isinstance(known, Tensor) and not known.plain and isinstance(result, Tensor):
        # in place: what holds the tensor still holds it
        if isinstance(target, ast.Attribute):
            return
        result = known
    assign(machine, target, result)


def _read(target: ast.expr) -> ast.expr:
    """The same place, to be read."""
    if isinstance(target, ast.Name):
        made: ast.expr = ast.Name(target.id, ast.Load())
    elif isinstance(target, ast.Attribute):
        made = ast.Attribute(target.value, target.attr, ast.Load())
    else:
        assert isinstance(target, ast.Subscript)
        made = ast.Subscript(target.value, target.slice, ast.Load())
    return ast.copy_location(made, target)


def _gathers(machine: Machine, target: ast.Name, value: ast.expr) -> bool:
    """`x = x or ...` in a loop over lanes."""
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
    """An operation of which the order and the number of lanes mean nothing."""
    scope = machine.place(target.id)
    if scope is None:
        return False
    known = machine.now.scopes[scope].get(target.id)
    types_: frozenset[type] | None
    if isinstance(known, Carried):
        if known.before is None or level_of(known.before) != Level.UNIFORM:
            return False
        types_ = types_of(known.before)
    elif isinstance(known, Gathered) and known.operation == operation:
        types_ = known.types
    else:
        return False
    found = used(machine, value)
    level, own = level_of(found), types_of(found)
    if level not in (Level.UNIFORM, Level.KIND) or types_ is None or own is None:
        raise machine.refusal("it gathers what is not known over lanes", value)
    if not (types_ | own) <= {bool}:
        raise machine.refusal("it gathers what is not known over lanes", value)
    if found == Known(operation == "and"):
        return True  # which changes nothing
    machine.store(scope, target.id, Gathered(operation, types_ | own), target)
    return True


@form(ast.Delete)
def _delete(machine: Machine, node: ast.Delete) -> None:
    for target in node.targets:
        if isinstance(target, ast.Name):
            scope = machine.place(target.id)
            if scope is None:
                raise machine.refusal("it changes what is not its own", target)
            machine.store(scope, target.id, Bad(f"{target.id} is deleted"), target)
        else:
            raise machine.refusal("it deletes what may be a lane's", target)


@form(ast.FunctionDef)
def _define(machine: Machine, node: ast.FunctionDef) -> None:
    if node.decorator_list:
        raise machine.refusal("a function has a decorator that is not known", node)
    scope = machine.place(node.name)
    assert scope is not None
    made: Value = expressions.define(machine, node)
    assert isinstance(made, Closure)
    machine.store(scope, node.name, made, node)


@form(ast.Import, ast.ImportFrom)
def _import(machine: Machine, node: ast.Import | ast.ImportFrom) -> None:
    for name in node.names:
        if isinstance(node, ast.Import):
            bare = name.name if name.asname else name.name.partition(".")[0]
            found: Any = sys.modules.get(bare)
            if name.name not in sys.modules:
                found = None
        else:
            module = sys.modules.get(node.module or "")
            found = None if node.level else getattr(module, name.name, None)
        if found is None:
            raise machine.refusal("it imports what is not known", node)
        own = name.asname or name.name.partition(".")[0]
        scope = machine.place(own)
        assert scope is not None
        machine.store(scope, own, machine.world.value(found, own), node)


# ---------------------------------------------------------------- ways


@form(ast.If)
def _if(machine: Machine, node: ast.If) -> None:
    if _first_sets(machine, node):
        return
    test = used(machine, node.test)
    found, level = iteration.truth(machine, test, node.test)
    if found is not None:
        execute(machine, node.body if found else node.orelse)
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


def _fill(machine: Machine, test: ast.expr, held: bool) -> None:
    """Where a list of lanes was asked whether it is empty: here it is not."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, held = test.operand, not held
    if held and isinstance(test, ast.Name):
        value = used(machine, test)
        if isinstance(value, Ref):
            own = machine.now.heap[value.number]
            if isinstance(own, List) and own.lanes is not None:
                machine.now.heap[value.number] = replace(own, filled=True)


def _first_sets(machine: Machine, node: ast.If) -> bool:
    """`if x is None: x = ...` in a loop over lanes, where the first lane sets x.

    It leads its kind, and what is set follows from that: so it is the same for all.
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
    known = machine.now.scopes[scope].get(target.id)
    if not isinstance(known, Carried) or known.before is None:
        return False
    before = types_of(known.before)
    if level_of(known.before) != Level.UNIFORM or before is None:
        return False
    found = used(machine, node.body[0].value)
    own = types_of(found)
    if level_of(found) not in (Level.UNIFORM, Level.KIND) or own is None:
        raise machine.refusal("the first lane sets what the others read", node.body[0])
    if NONE in own:
        raise machine.refusal("the first lane sets what the others read", node.body[0])
    made = Data(Level.UNIFORM, (before - {NONE}) | own)
    machine.store(scope, target.id, made, target)
    if machine.lane is not None:
        machine.lane.firsts[scope, target.id] = machine.site(target)
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
        # what is tried is plain arithmetic, and fails for all lanes or for none
        if machine.lane is not None:
            raise machine.refusal("what is tried may fail for some lanes", caught[0])
        for part in node.body:
            for x in ast.walk(part):
                if isinstance(x, _WORK):
                    raise machine.refusal("what is tried may fail on the way", x)
        failed = machine.now.copy()
        for x in calls.stored(node.body):
            if isinstance(x, ast.Name):
                scope = machine.place(x.id)
                if scope is not None:
                    bad = Bad(f"{x.id} may be set before a failure, or not")
                    failed.scopes[scope][x.id] = bad
    if node.finalbody:
        for x in (y for part in node.body for y in ast.walk(part)):
            if isinstance(x, (ast.Return, ast.Break, ast.Continue)):
                raise machine.refusal("it leaves what is tried before its end", x)
    execute(machine, node.body)
    if machine.memory is not None:
        execute(machine, node.orelse)
    for handler in caught:
        assert failed is not None
        done, machine.memory = machine.memory, failed.copy()
        if handler.name is not None:
            raise machine.refusal("it looks at what failed", handler)
        execute(machine, handler.body)
        machine.memory = merge(done, machine.memory, Level.UNIFORM, None)
    if node.finalbody and machine.memory is not None:
        execute(machine, node.finalbody)


@form(ast.With)
def _with(machine: Machine, node: ast.With) -> None:
    for item in node.items:
        call = item.context_expr
        if item.optional_vars is not None or not isinstance(call, ast.Call):
            raise machine.refusal("it enters what is not known", call)
        function = used(machine, call.func)
        if not isinstance(function, Known) or function.value not in calls.CONTEXTS:
            raise machine.refusal("it enters what is not known", call)
        for x in call.args:
            if level_of(used(machine, x)) != Level.UNIFORM:
                raise machine.refusal("it enters what is not known", call)
    execute(machine, node.body)


# ---------------------------------------------------------------- loops


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


@form(ast.For)
def _for(machine: Machine, node: ast.For) -> None:
    raise AssertionError


def _set_in(node: ast.For | ast.While) -> frozenset[str]:
    """The variables that a loop sets, as far as its own text says."""
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


def _broken_off(machine: Machine, node: ast.For, rest: Seq[ast.stmt]) -> bool:
    """Go through a loop. True: and through the rest, once for each way it may end."""
    value = used(machine, node.iter)

    def body(x: Value) -> None:
        assign(machine, node.target, x)
        execute(machine, node.body)

    if isinstance(value, Method) and isinstance(value.of, Grouped):
        grouped, whole = value.of, value.name.endswith("items")

        def turn() -> None:
            site = machine.site(node)
            key, held = iteration.sorted_lists(machine, grouped, site)
            body(Items((key, held)) if whole else held)

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
        # a lane was met that ends the loop, or none: the same for all lanes
        ended = machine.memory
        execute(machine, rest)
        first = machine.memory
        machine.memory = broken
        execute(machine, rest)
        machine.memory = merge(first, machine.memory, Level.UNIFORM, None)
        del ended
        return True
    if isinstance(items, list) and len(items) <= UNROLLED and not _breaks(node.body):
        unrolled(machine, items, body, node)
        _orelse(machine, node)
        return False
    if isinstance(items, list):
        found = items[0] if items else Known(None)
        for x in items[1:]:
            found = join(found, x, Level.UNIFORM)
        if isinstance(found, Known):
            found = Data(Level.UNIFORM, types_of(found))
        items = Many(found)
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
        found, own = iteration.truth(machine, test, node.test)
        level = max(level, own)
        if found is False:
            machine.memory = None
            return
        execute(machine, node.body)

    before = machine.now.copy()
    over_many(machine, body, node, Level.UNIFORM, _set_in(node))
    if level != Level.UNIFORM:
        machine.memory = before
        over_many(machine, body, node, level, _set_in(node))
    _orelse(machine, node)
