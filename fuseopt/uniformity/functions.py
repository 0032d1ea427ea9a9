"""Functions that are no source: of Python, of math, of torch besides ATen.

Each takes the machine, the arguments and the call, and gives what is known of the
result. A function that has no line here is refused.
"""

from __future__ import annotations

import ast
import builtins
import copy
import math
import operator
import typing
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from .. import compat
from . import containers, tensors
from .machine import Machine, usable
from .memory import Dict, List
from .values import (
    NUMBER,
    PLAIN,
    Count,
    Data,
    First,
    Group,
    Grouped,
    Held,
    Index,
    Items,
    Known,
    Level,
    Many,
    Optimizer,
    Ref,
    Sequence,
    State,
    States,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
    uniform,
)

Args = list[Value]
Keywords = dict[str, Value]
Rule = Callable[[Machine, Args, Keywords, ast.AST], Value]
RULES: dict[int, Rule] = {}
_alive: list[Any] = []


def rule(*functions: Any) -> Callable[[Rule], Rule]:
    """Say what is known of calls of some functions."""

    def take(made: Rule) -> Rule:
        for function in functions:
            if function is not None:
                _alive.append(function)
                RULES[id(function)] = made
        return made

    return take


def odd(value: Value) -> str:
    """What differs between lanes, in words."""
    if isinstance(value, Index):
        return "where a lane stands"
    if isinstance(value, Count):
        return "how many lanes there are"
    return "what differs between lanes"


def compute(
    machine: Machine, args: list[Value], node: ast.AST, types: tuple[type, ...] = ()
) -> Value:
    """Plain data computed from some: of the level of what is known least of."""
    level = Level.UNIFORM
    for value in args:
        usable(machine, value, node)
        if isinstance(value, Tensor):
            # the function asks for its contents
            level = Level.NUMBER
            continue
        if isinstance(value, Items):
            own: Level | None = level_of(compute(machine, list(value.items), node))
        elif isinstance(value, Many):
            own = level_of(compute(machine, [value.item], node))
            own = None if own is None else max(own, value.level)
        elif isinstance(value, Ref):
            own = _of_list(machine, value, node)
        else:
            own = level_of(value)
        if own is None or (
            isinstance(value, Known) and not isinstance(value.value, PLAIN)
        ):
            raise machine.refusal(f"it computes with {odd(value)}", node)
        level = max(level, own)
    return Data(level, frozenset(types) if types and level < Level.NUMBER else None)


def _of_list(machine: Machine, value: Ref, node: ast.AST) -> Level | None:
    held = machine.held(value, node)
    if not isinstance(held, List) or held.lanes is not None:
        return None
    known = [*(held.items or ()), *([] if held.many is None else [held.many])]
    found = level_of(compute(machine, known, node))
    return None if found is None else max(found, held.level)


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
    found, level = containers.truth(machine, args[0], node)
    return Known(found) if found is not None else Data(level, frozenset({bool}))


@rule(builtins.min, builtins.max, builtins.sum, math.prod, math.fsum)
def _fold(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if keywords.keys() - {"default", "start"}:
        raise machine.refusal("it compares by a function", node)
    if len(args) == 1 or (len(args) == 2 and not _scalar(args[1])):
        over = containers.lanes_of(machine, args[0], node)
        if over is not None:
            raise machine.refusal("it computes what all lanes give together", node)
        items = containers.spread(machine, args[0], machine.site(node), node)
        known = items if isinstance(items, list) else [items.item]  # type: ignore
        level = Level.UNIFORM if isinstance(items, list) else items.level  # type: ignore
        args = [*known, *args[1:]]
        if any(isinstance(x, Tensor) for x in args):
            return _of_tensors(args)
        found = compute(machine, [*args, *keywords.values()], node)
        own = level_of(found)
        assert own is not None
        return Data(max(own, level), types_of(found))
    if any(isinstance(x, Tensor) for x in args):
        return _of_tensors([usable(machine, x, node) for x in args])
    return compute(machine, [*args, *keywords.values()], node)


def _scalar(x: Value) -> bool:
    return isinstance(x, Tensor) or level_of(x) is not None


def _of_tensors(args: Args) -> Value:
    shared = all(isinstance(x, Tensor) and x.shared for x in args)
    return Tensor(shared=shared, number=True)


@rule(builtins.any, builtins.all)
def _any(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    over = containers.lanes_of(machine, args[0], node)
    if over is not None:
        _, level = containers.truth(machine, over.item, node)
        return Data(Level.UNIFORM, frozenset({bool}))
    items = containers.spread(machine, args[0], machine.site(node), node)
    if isinstance(items, Sequence):
        raise machine.refusal("it asks of lanes", node)
    known = items if isinstance(items, list) else [items.item]
    worst = Level.UNIFORM if isinstance(items, list) else items.level
    for x in known:
        found, level = containers.truth(machine, x, node)
        worst = max(worst, level)
    return Data(worst, frozenset({bool}))


# ---------------------------------------------------------------- types


@rule(builtins.isinstance)
def _isinstance(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    value, kinds = usable(machine, args[0], node), _classes(machine, args[1], node)
    if isinstance(value, Known):
        return Known(isinstance(value.value, kinds))
    if isinstance(value, Data):
        return _among(value, kinds)
    if isinstance(value, Tensor):
        if value.none or value.plain or value.number:
            return Data(Level.KIND, frozenset({bool}))
        if torch.Tensor in kinds:
            return Known(True)
        return Data(Level.UNIFORM if value.shared else Level.KIND, frozenset({bool}))
    if isinstance(value, First):
        return Data(Level.UNIFORM, frozenset({bool}))
    python = _python_type(machine, value)
    if python is None:
        raise machine.refusal("it asks for the class of what is not known", node)
    return Known(any(issubclass(python, k) for k in kinds))


def _classes(machine: Machine, value: Value, node: ast.AST) -> tuple[type, ...]:
    if isinstance(value, Known) and isinstance(value.value, type):
        if type(value.value).__instancecheck__ is type.__instancecheck__ or (
            value.value.__module__.partition(".")[0]
            in ("torch", "collections", "typing", "numbers", "builtins")
        ):
            return (value.value,)
    if isinstance(value, Items):
        return tuple(c for x in value.items for c in _classes(machine, x, node))
    import types

    if isinstance(value, Known) and isinstance(value.value, types.UnionType):
        return tuple(
            c for x in value.value.__args__ for c in _classes(machine, Known(x), node)
        )
    raise machine.refusal("it asks for a class that is not known", node)


def _among(value: Data, kinds: tuple[type, ...]) -> Value:
    if value.types is not None:
        inside = [any(issubclass(k, c) for c in kinds) for k in value.types]
        if all(inside):
            return Known(True)
        if not any(inside):
            return Known(False)
    return Data(value.level, frozenset({bool}))


def _python_type(machine: Machine, value: Value) -> type | None:
    if isinstance(value, Items):
        return tuple
    if isinstance(value, Ref):
        return list if isinstance(machine.now.heap[value.number], List) else dict
    if isinstance(value, (Group, State)):
        return dict
    if isinstance(value, Held):
        return type(machine.world.object(value))
    if isinstance(value, Optimizer):
        kind: type = machine.world.kind
        return kind
    return None


@rule(type)
def _type(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    value = usable(machine, args[0], node)
    if len(args) != 1:
        raise machine.refusal("it makes a class", node)
    if isinstance(value, Optimizer):
        return Known(machine.world.kind)
    if isinstance(value, Tensor):
        return Data(Level.KIND, frozenset({type(None)}))
    if isinstance(value, Known):
        return Known(type(value.value))
    python = _python_type(machine, value)
    if python is None:
        raise machine.refusal("it asks for the class of what is not known", node)
    return Known(python)


@rule(builtins.issubclass)
def _issubclass(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    a, b = args
    if isinstance(a, Known) and isinstance(b, Known):
        return Known(issubclass(a.value, b.value))
    raise machine.refusal("it asks for a class that is not known", node)


@rule(builtins.callable)
def _callable(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if isinstance(args[0], Known):
        return Known(callable(args[0].value))
    if isinstance(args[0], (Data, Tensor, Items, Ref)):
        return Known(False)
    raise machine.refusal("it asks what is not known", node)


# ---------------------------------------------------------------- containers


@rule(builtins.len)
def _len(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return containers.length(machine, args[0], node)


@rule(builtins.range)
def _range(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    for value in args:
        usable(machine, value, node)
    if isinstance(args[-1], Count) and all(x == Known(0) for x in args[:-1]):
        lanes = args[-1].lanes
        if len(args) < 3 and lanes != "state":
            return Sequence(lanes, Index(lanes))
    found = compute(machine, args, node)
    level = level_of(found)
    assert level is not None
    if level == Level.NUMBER:
        raise machine.refusal("it counts to a number that was read from a lane", node)
    values = [x.value for x in args if isinstance(x, Known)]
    if len(values) == len(args):
        known = range(*values)
        if len(known) <= 8:
            return Items(tuple(Known(i) for i in known))
    return Many(Data(level, frozenset({int})), level)


@rule(builtins.enumerate)
def _enumerate(
    machine: Machine, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    over = containers.lanes_of(machine, args[0], node)
    start = args[1] if len(args) > 1 else keywords.get("start", Known(0))
    if over is not None:
        if start != Known(0):
            raise machine.refusal("it counts lanes from another number than 0", node)
        return Sequence(over.lanes, Items((Index(over.lanes), over.item)))
    items = containers.spread(machine, args[0], machine.site(node), node)
    assert not isinstance(items, Sequence)
    if isinstance(items, list):
        if isinstance(start, Known):
            return Items(
                tuple(Items((Known(start.value + i), x)) for i, x in enumerate(items))
            )
        return Items(tuple(Items((uniform(int), x)) for x in items))
    if isinstance(items.item, Group):
        return Many(Items((uniform(int), items.item)))
    return Many(Items((Data(items.level, frozenset({int})), items.item)), items.level)


@rule(builtins.zip)
def _zip(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if keywords.keys() - {"strict"}:
        raise machine.refusal("it is not known what this gives", node)
    over = [containers.lanes_of(machine, x, node) for x in args]
    if any(x is not None for x in over):
        items: list[Value] = []
        lanes: Any = next(x.lanes for x in over if x is not None)
        for x, value in zip(over, args, strict=True):
            if x is None:
                if _empty(machine, value):
                    return Items(())
                raise machine.refusal("it gives lanes items by their places", node)
            if x.lanes != lanes:
                raise machine.refusal(
                    "lists are not known to have the same lanes", node
                )
            items.append(x.item)
        return Sequence(lanes, Items(tuple(items)))
    spread = [containers.spread(machine, x, machine.site(node), node) for x in args]
    if all(isinstance(x, list) for x in spread):
        rows = zip(*spread, strict=False)  # type: ignore[arg-type]
        return Items(tuple(Items(tuple(row)) for row in rows))
    level = Level.UNIFORM
    parts: list[Value] = []
    for x in spread:
        if isinstance(x, list):
            if not x:
                return Items(())
            found = x[0]
            for y in x[1:]:
                found = join(found, y, Level.UNIFORM)
            parts.append(found)
        else:
            assert isinstance(x, Many)
            level = max(level, x.level)
            parts.append(x.item)
    return Many(Items(tuple(parts)), level)


def _empty(machine: Machine, value: Value) -> bool:
    if isinstance(value, Ref):
        held = machine.now.heap[value.number]
        return isinstance(held, List) and held.items == () and not held.broken
    return value == Items(())


@rule(list, tuple)
def _list(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if not args:
        return machine.list_of()
    value = args[0]
    over = containers.lanes_of(machine, value, node)
    if over is not None:
        return machine.new(
            List(None, lanes=over.lanes, item=over.item, writer=machine.site(node))
        )
    items = containers.spread(machine, value, machine.site(node), node)
    if isinstance(items, list):
        return machine.list_of(*items)
    assert isinstance(items, Many)
    if isinstance(items.item, Group):
        return value
    return machine.new(List(None, items.item, items.level))


@rule(builtins.reversed, builtins.sorted, set, frozenset)
def _ordered(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if containers.lanes_of(machine, args[0], node) is not None:
        raise machine.refusal("it takes lanes in an order of its own", node)
    if keywords.keys() - {"reverse"}:
        raise machine.refusal("it sorts by a function", node)
    items = containers.spread(machine, args[0], machine.site(node), node)
    known = items if isinstance(items, list) else [items.item]  # type: ignore
    level = Level.UNIFORM if isinstance(items, list) else items.level  # type: ignore
    found = compute(machine, known, node)
    own = level_of(found)
    if own is None or own == Level.NUMBER:
        raise machine.refusal("it sorts what differs between lanes", node)
    types_: frozenset[type] | None = frozenset()
    for x in known:
        theirs = types_of(x)
        types_ = None if theirs is None or types_ is None else types_ | theirs
    return machine.new(List(None, Data(max(own, level), types_), max(own, level)))


@rule(dict)
def _dict(machine: Machine, args: Args, keywords: Keywords, node: ast.AST) -> Value:
    if args:
        raise machine.refusal("it makes a dict of what is not known", node)
    return machine.new(Dict(tuple(keywords.items())))


@rule(copy.copy)
def _copy(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if level_of(args[0]) is not None:
        return args[0]
    raise machine.refusal("it copies an object", node)


# ---------------------------------------------------------------- attributes by name


@rule(builtins.getattr)
def _getattr(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    from . import objects

    value, name = usable(machine, args[0], node), args[1]
    if not isinstance(name, Known) or type(name.value) is not str:
        raise machine.refusal("it reads an attribute whose name is not known", node)
    if isinstance(value, Optimizer):
        found = objects.of_optimizer(machine, value, name.value, node)
        if found is None:
            if len(args) > 2:
                return args[2]
            raise machine.refusal(f"the optimizer has no attribute {name.value}", node)
        return found
    return objects.attribute(machine, value, name.value, node)


@rule(builtins.hasattr)
def _hasattr(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    from . import objects

    value, name = usable(machine, args[0], node), args[1]
    if not isinstance(name, Known) or type(name.value) is not str:
        raise machine.refusal("it asks for an attribute whose name is not known", node)
    if isinstance(value, Optimizer):
        if ("attribute", name.value) in machine.world.written:
            return uniform(bool)
        found = objects.of_optimizer(machine, value, name.value, node)
        return Known(found is not None)
    if isinstance(value, Known):
        return Known(hasattr(value.value, name.value))
    if isinstance(value, (Tensor, First)):
        objects.attribute(machine, value, name.value, node)
        return Known(True)
    raise machine.refusal("it asks for an attribute of what is not known", node)


# ---------------------------------------------------------------- text


@rule(str, builtins.format, builtins.repr)
def _text(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if len(args) == 1 and isinstance(args[0], Known) and type(args[0].value) is str:
        return args[0]
    found = compute(machine, args, node, (str,))
    if level_of(found) == Level.NUMBER:
        raise machine.refusal("it makes text of contents of a tensor", node)
    return found


@rule(warnings.warn)
def _warn(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return Known(None)


@rule(typing.cast)
def _cast(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return args[1]


# ---------------------------------------------------------------- torch


def _truth(value: bool) -> Rule:
    return lambda *_: Known(value)


rule(torch.jit.is_scripting, torch.jit.is_tracing)(_truth(False))
rule(getattr(torch.jit._script, "is_scripting", None))(_truth(False))


@rule(
    torch.compiler.is_compiling,
    torch.compiler.is_dynamo_compiling,
    getattr(torch._utils, "is_compiling", None),
    torch.is_grad_enabled,
    torch.cuda.is_available,
    getattr(torch.cuda, "is_current_stream_capturing", None),
)
def _unknown_truth(*_: Any) -> Value:
    return uniform(bool)


@rule(getattr(torch._C, "_get_privateuse1_backend_name", None))
def _backend_name(*_: Any) -> Value:
    return uniform(str)


@rule(torch.get_default_dtype)
def _dtype(*_: Any) -> Value:
    return uniform(torch.dtype)


@rule(torch.finfo, torch.iinfo)
def _finfo(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    info = type(torch.finfo(torch.float32)), type(torch.iinfo(torch.int32))
    found = compute(machine, args, node)
    return Data(level_of(found) or Level.UNIFORM, frozenset(info))


@rule(torch.device)
def _device(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return compute(machine, args, node, (torch.device,))


@rule(torch.is_tensor)
def _is_tensor(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return _isinstance(machine, [args[0], Known(torch.Tensor)], {}, node)


@rule(torch.is_complex, torch.is_floating_point, torch.numel)
def _asked(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    name = ast.unparse(node.func).rpartition(".")[2]  # type: ignore[attr-defined]
    value = usable(machine, args[0], node)
    if isinstance(value, (Tensor, First)):
        found = tensors.asked(machine, value, name, Level.UNIFORM, node)
        if found is not None:
            return found
    raise machine.refusal("it asks what is not known", node)


rule(
    torch.is_complex,
)(lambda m, a, k, n: _metadata(m, a, n, "is_complex"))
rule(
    torch.is_floating_point,
)(lambda m, a, k, n: _metadata(m, a, n, "is_floating_point"))
rule(torch.numel)(lambda m, a, k, n: _metadata(m, a, n, "numel"))


def _metadata(machine: Machine, args: Args, node: ast.AST, name: str) -> Value:
    value = usable(machine, args[0], node)
    if isinstance(value, (Tensor, First)):
        found = tensors.asked(machine, value, name, Level.UNIFORM, node)
        assert found is not None
        return found
    if level_of(value) is not None:
        return compute(machine, [value], node, (bool,))
    raise machine.refusal("it asks what is not known", node)


@rule(torch.result_type, torch.promote_types, torch.can_cast)
def _promoted(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    for x in args:
        usable(machine, x, node)
    return Data(Level.KIND, frozenset({torch.dtype, bool}))


@rule(getattr(torch_optimizer, "_get_value", None))
def _get_value(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    value = usable(machine, args[0], node)
    if isinstance(value, Tensor):
        return Tensor(shared=value.shared, number=True)
    return value


@rule(getattr(torch_optimizer, "_stack_if_compiling", None))
def _stack(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    # one tensor of as many numbers, or the list of them: a position is of its lane
    if containers.lanes_of(machine, args[0], node) is None:
        if not _empty(machine, args[0]):
            raise machine.refusal("it stacks what are no lanes", node)
    return args[0]


@rule(getattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", None))
@rule(getattr(torch.optim.Optimizer, "_cuda_graph_capture_health_check", None))
@rule(getattr(torch._dynamo, "graph_break", None))
def _nothing(*_: Any) -> Value:
    return Known(None)


def _sorted_by(machine: Machine, args: Args, node: ast.AST, keys: Any) -> Value:
    outer = machine.held(args[0], node) if isinstance(args[0], Ref) else None
    if machine.lane is not None:
        raise machine.refusal("it sorts lanes within a loop over lanes", node)
    if not isinstance(outer, List) or outer.items is None:
        raise machine.refusal("it sorts lists that are not known", node)
    lanes: Any = None
    for x in outer.items:
        found = containers.lanes_of(machine, x, node)
        if found is None:
            if not _empty(machine, x):
                raise machine.refusal("it sorts what are no lanes", node)
            continue
        if lanes is not None and found.lanes != lanes:
            raise machine.refusal("lists are not known to have the same lanes", node)
        lanes = found.lanes
    first = outer.items[0] if outer.items else Known(None)
    held = machine.now.heap[first.number] if isinstance(first, Ref) else None
    own = containers.lanes_of(machine, first, node)
    single = (
        isinstance(held, List)
        and held.filled
        and own is not None
        and isinstance(own.item, Tensor)
        and own.item.role == "param"
        and machine.world.single
    )
    return Grouped(outer.items, lanes, *keys, single)


_DEVICE = Data(Level.UNIFORM, frozenset({torch.device, type(None)}))
_DTYPE = Data(Level.UNIFORM, frozenset({torch.dtype, type(None)}))


@rule(
    getattr(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype", None),
    getattr(torch_optimizer, "_group_tensors_by_device_and_dtype", None),
)
def _by_dtype(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    return _sorted_by(machine, args, node, ((_DEVICE, _DTYPE), True))


@rule(*compat.SORTS_BY_DIMS)
def _by_dims(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    keys = (_DEVICE, _DTYPE, uniform(bool))
    return _sorted_by(machine, args, node, (keys, False))


# ---------------------------------------------------------------- lists of lanes


def foreach(
    machine: Machine, name: str, args: Args, keywords: Keywords, node: ast.AST
) -> Value:
    """A call of torch._foreach_*: what it does to a position is of one lane."""
    lanes: Any = None
    own: list[Value] = []
    empty, pure = False, True
    for value in (*args, *keywords.values()):
        usable(machine, value, node)
        over = containers.lanes_of(machine, value, node)
        if over is None:
            if _empty(machine, value):
                empty = True
            else:
                own.append(value)
            continue
        if lanes is not None and over.lanes != lanes:
            # which tensors meet in a call the dry run shows, not so with numbers
            if not (_pure(over.item) and pure):
                raise machine.refusal(
                    "lists are not known to have the same lanes", node
                )
        else:
            lanes = over.lanes
        pure = pure and _pure(over.item)
        tensors.Operands(machine, node).take(over.item)
    if lanes is None:
        if empty:
            return machine.list_of()
        operands = tensors.Operands(machine, node)
        for value in own:
            operands.take(value)
        if name.endswith("_"):
            return Known(None)
        return Many(Tensor(shared=operands.shared), Level.KIND)
    if machine.lane is not None:
        raise machine.refusal("it uses all lanes within a loop over lanes", node)
    for value in own:
        scalar = isinstance(value, Tensor) and value.shared
        if level_of(value) is None and not scalar:
            raise machine.refusal("it gives lanes items by their places", node)
        if isinstance(value, Known) and not isinstance(value.value, PLAIN):
            raise machine.refusal("a call of torch is given an object", node)
    if name.endswith("_"):
        return Known(None)
    made = List(None, lanes=lanes, item=Tensor(), writer=machine.site(node))
    return machine.new(made)


def _pure(value: Value) -> bool:
    return isinstance(value, Tensor) and not value.number and not value.plain


_OPERATORS = {
    **{getattr(operator, n): n for n in "add sub mul truediv pow neg".split()},
}


@rule(*_OPERATORS)
def _operator(machine: Machine, args: Args, _: Keywords, node: ast.AST) -> Value:
    if any(isinstance(x, Tensor) for x in args):
        return tensors.aten(machine, "add", args, {}, node)
    return compute(machine, args, node)


_ = (NUMBER, States)
