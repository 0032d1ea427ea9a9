"""Calls: of functions that have a source, which are gone through, and of others."""

from __future__ import annotations

import ast
import types
from collections.abc import Sequence as Seq
from typing import Any

import torch

from .. import compat
from ..paths import is_known
from . import containers, functions, objects, tensors
from .machine import DEPTH, Definition, Frame, Machine, Raises, usable
from .memory import Dict, List, Memory, meet, merge
from .source import NoSource, Source, inner_codes
from .values import (
    NUMBER,
    PLAIN,
    Bound,
    Choice,
    Closure,
    Count,
    Data,
    First,
    Group,
    Grouped,
    Groups,
    Held,
    Items,
    Known,
    Level,
    Many,
    Method,
    Optimizer,
    Ref,
    State,
    States,
    Tensor,
    Value,
    join,
    level_of,
    types_of,
    uniform,
)

#: What `with` may enter: it changes how ATen runs, not for which lanes.
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_MODES = (*CONTEXTS, torch.inference_mode)


def call(
    machine: Machine,
    function: Value,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """What a call gives."""
    usable(machine, function, node)
    for value in (*args, *keywords.values()):
        usable(machine, value, node)
    if isinstance(function, Bound):
        return call(machine, function.function, [function.first, *args], keywords, node)
    if isinstance(function, Method):
        return method(machine, function.of, function.name, args, keywords, node)
    if isinstance(function, Closure):
        return _closure(machine, function, args, keywords, node)
    if isinstance(function, Choice):
        first, *rest = function.of

        def others() -> Value:
            more = rest[0] if len(rest) == 1 else Choice(tuple(rest))
            return call(machine, more, args, keywords, node)

        return machine.either(
            Level.UNIFORM,
            node,
            lambda: call(machine, first, args, keywords, node),
            others,
        )
    if isinstance(function, Known):
        return _known(machine, function.value, args, keywords, node)
    raise machine.refusal("it calls what is not known", node)


def _known(
    machine: Machine,
    function: Any,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    # Dynamo puts a layer around what it is not to trace: it runs it for real, as
    # `_init_group`, or does not trace the leading lanes' step at all
    function = getattr(function, "_torchdynamo_orig_callable", function)
    made = functions.RULES.get(id(function))
    if made is not None:
        return made(machine, args, keywords, node)
    if tensors.is_foreach(function):
        return functions.foreach(machine, function.__name__, args, keywords, node)
    name = tensors.is_aten(function)
    if name is not None:
        return tensors.aten(machine, name, args, keywords, node)
    if isinstance(function, types.MethodType):
        first = machine.world.value(function.__self__, "self")
        if function.__self__ is machine.world.optimizer:
            first = Optimizer()
        usable(machine, first, node)
        return _known(machine, function.__func__, [first, *args], keywords, node)
    if isinstance(function, types.MethodDescriptorType) and args:
        owner = function.__objclass__
        if issubclass(torch.Tensor, owner) and isinstance(args[0], Tensor):
            return method(machine, args[0], function.__name__, args[1:], keywords, node)
    if isinstance(function, types.FunctionType):
        return _function(machine, function, args, keywords, node)
    if function in CONTEXTS:
        return Data(Level.UNIFORM)
    what = getattr(function, "__qualname__", type(function).__name__)
    raise machine.refusal(f"it calls {what}, of which nothing is known", node)


# ---------------------------------------------------------------- functions


def _cell(function: types.FunctionType, name: str) -> Any:
    place = function.__code__.co_freevars.index(name)
    return (function.__closure__ or ())[place].cell_contents


def _function(
    machine: Machine,
    function: types.FunctionType,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    code = function.__code__
    if code is compat.DECORATED:
        mode = getattr(_cell(function, "ctx_factory"), "__self__", None)
        if type(mode) in _MODES:
            return call(machine, Known(_cell(function, "func")), args, keywords, node)
        raise machine.refusal("a function has a decorator that is not known", node)
    if code in (compat.GRAD_MODE, compat.PROFILED, compat.FALLBACK):
        return call(machine, Known(_cell(function, "func")), args, keywords, node)
    frame = frame_of(machine, function, node)
    bind(machine, frame, function, args, keywords, node)
    return run(machine, frame, node)


def frame_of(machine: Machine, function: types.FunctionType, node: ast.AST) -> Frame:
    """A frame for a function that exists, without its arguments."""
    try:
        source = machine.sources.of(function)
    except NoSource as error:
        raise machine.refusal(f"{function.__qualname__}: {error}", node)
    if any(f.source.node is source.node for f in machine.frames):
        raise machine.refusal("it calls itself", node)
    code = function.__code__
    if not is_known(code):
        machine.codes |= inner_codes(code)
    cells: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:
            raise machine.refusal(
                f"{name} of {function.__qualname__} is not known", node
            )
    names = frozenset(code.co_varnames) | frozenset(code.co_cellvars)
    return Frame(
        source,
        machine.scope(),
        names,
        function.__globals__,
        cells,
        owner=cells.get("__class__"),
    )


def _set(machine: Machine, frame: Frame, name: str, value: Value) -> None:
    machine.now.scopes[frame.scope][name] = value


def bind(
    machine: Machine,
    frame: Frame,
    function: types.FunctionType,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> None:
    """Give a function its arguments."""
    given = frame.source.node.args
    defaults = function.__defaults__ or ()
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    title = function.__qualname__
    values: dict[str, Value] = {
        name: machine.world.value(x, f"a default of {title}")
        for name, x in zip(names[len(names) - len(defaults) :], defaults, strict=True)
    }
    for name, x in (function.__kwdefaults__ or {}).items():
        values[name] = machine.world.value(x, f"a default of {title}")
    _bind(machine, frame, given, values, args, keywords, node)


def _bind(
    machine: Machine,
    frame: Frame,
    given: ast.arguments,
    values: dict[str, Value],
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> None:
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    more = [a.arg for a in given.kwonlyargs]
    if names and args:
        frame.first = args[0]
    rest = args[len(names) :]
    values.update(zip(names, args, strict=False))
    extra: dict[str, Value] = {}
    for name, value in keywords.items():
        if name in names or name in more:
            values[name] = value
        else:
            extra[name] = value
    if (rest and given.vararg is None) or (extra and given.kwarg is None):
        raise machine.refusal("it gives a function other arguments than it takes", node)
    if given.vararg is not None:
        values[given.vararg.arg] = Items(tuple(rest))
    if given.kwarg is not None:
        values[given.kwarg.arg] = machine.new(Dict(tuple(extra.items())))
    for name in (*names, *more):
        if name not in values:
            raise machine.refusal(
                "it gives a function other arguments than it takes", node
            )
    for name, value in values.items():
        _set(machine, frame, name, value)


def _closure(
    machine: Machine,
    function: Closure,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    made: Definition = machine.definitions[function.number]
    if any(f.source.node is made.node for f in machine.frames):
        raise machine.refusal("it calls itself", node)
    outer = made.frames[-1]
    source = Source(made.node, outer.source.filename, outer.source.code)
    frame = Frame(
        source,
        machine.scope(),
        local_names(made.node),
        outer.globals,
        outer.cells,
        made.frames,
        owner=outer.owner,
    )
    given = made.node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args)]
    defaults = made.defaults
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values.update(made.keyword_defaults)
    _bind(machine, frame, given, values, args, keywords, node)
    return run(machine, frame, node)


def local_names(node: ast.AST) -> frozenset[str]:
    """The variables of a function that the step defines."""
    found: set[str] = set()
    outside: set[str] = set()
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        given = node.args
        found |= {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
        found |= {a.arg for a in (given.vararg, given.kwarg) if a is not None}
    body = node.body if isinstance(node, ast.FunctionDef) else []
    for x in stored(body):
        if isinstance(x, (ast.Global, ast.Nonlocal)):
            outside |= set(x.names)
        elif isinstance(x, ast.Name):
            found.add(x.id)
        elif isinstance(x, ast.FunctionDef):
            found.add(x.name)
        elif isinstance(x, ast.alias):
            found.add(x.asname or x.name.partition(".")[0])
        elif isinstance(x, ast.ExceptHandler) and x.name:
            found.add(x.name)
    return frozenset(found - outside)


def stored(body: Seq[ast.AST]) -> list[ast.AST]:
    """What sets variables in some statements, not in functions that they define."""
    found: list[ast.AST] = []
    waiting = list(body)
    while waiting:
        x = waiting.pop()
        if isinstance(x, ast.FunctionDef):
            found.append(x)
            continue
        if isinstance(x, ast.Lambda):
            continue
        if (isinstance(x, ast.Name) and isinstance(x.ctx, (ast.Store, ast.Del))) or isinstance(x, (ast.Global, ast.Nonlocal, ast.alias, ast.ExceptHandler)):
            found.append(x)
        waiting.extend(ast.iter_child_nodes(x))
    return found


def run(machine: Machine, frame: Frame, node: ast.AST) -> Value:
    """Go through a function whose arguments are set."""
    if len(machine.frames) >= DEPTH:
        raise machine.refusal("its calls are too deep", node)
    path, level = machine.path, machine.level
    machine.path = (*path, id(node))
    machine.level = Level.UNIFORM
    machine.frames.append(frame)
    body = frame.source.node.body
    try:
        if isinstance(body, list):
            machine.execute(machine, body)
            if machine.memory is not None:
                frame.returns.append((Known(None), machine.memory, Level.UNIFORM))
        else:
            frame.returns.append(
                (machine.evaluate(machine, body), machine.memory, Level.UNIFORM)
            )
    finally:
        machine.frames.pop()
        machine.path, machine.level = path, level
    return _returned(machine, frame, node)


def _returned(machine: Machine, frame: Frame, node: ast.AST) -> Value:
    memory: Memory | None = None
    found: Value | None = None
    worst = Level.UNIFORM
    # the last return is met by all ways that no earlier one took
    for k, (value, own, level) in enumerate(reversed(frame.returns)):
        worst = max(worst, level)
        if found is not None and memory is not None and own is not None:
            found = meet(found, value, worst, (memory, own))
        else:
            found = value if found is None else join(found, value, worst)
        branch = (*machine.site(node), "return", k), machine.turns()
        memory = merge(memory, own, worst, branch)
    machine.memory = memory
    if memory is None:
        raise Raises
    if not any(frame is x for made in machine.definitions for x in made.frames):
        memory.scopes.pop(frame.scope, None)
    return Known(None) if found is None else found


# ---------------------------------------------------------------- methods


def method(
    machine: Machine,
    value: Value,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """What a call of a built-in method gives."""
    if isinstance(value, (Tensor, First)):
        return _of_tensor(machine, value, name, args, keywords, node)
    if isinstance(value, Ref):
        held = machine.now.heap[value.number]
        if isinstance(held, List):
            return _of_list(machine, value, held, name, args, node)
        return _of_dict(machine, value, held, name, args, keywords, node)
    if isinstance(value, State):
        return _of_state(machine, name, args, keywords, node)
    if isinstance(value, States):
        if name == "get" and isinstance(args[0], Tensor) and args[0].role == "param":
            if len(args) == 1:
                raise machine.refusal("state that may be missing is not followed", node)
        raise machine.refusal("it does not say whose state it reads", node)
    if isinstance(value, Group):
        return _of_group(machine, value, name, args, node)
    if isinstance(value, Grouped):
        return _of_grouped(machine, value, name, node)
    if isinstance(value, Held):
        return _of_held(machine, value, name, args, node)
    if isinstance(value, Items) and name in ("index", "count"):
        return functions.compute(machine, [value, *args], node)
    if level_of(value) is not None:
        return _of_data(machine, value, name, args, keywords, node)
    raise machine.refusal(f"it calls {name} of what is not known", node)


def _of_tensor(
    machine: Machine,
    value: Tensor | First,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    level = Level.UNIFORM
    for x in (*args, *keywords.values()):
        usable(machine, x, node)
        own = level_of(x)
        if own is not None:
            level = max(level, own)
    found = tensors.asked(machine, value, name, level, node)
    if found is not None:
        if level == Level.NUMBER:
            raise machine.refusal(
                "it asks for sizes by a number read from a lane", node
            )
        return found
    if isinstance(value, First):
        raise machine.refusal("it uses a tensor of the first lane", node)
    if name in tensors.READS:
        if name == "tolist":
            raise machine.refusal("it reads contents of a tensor as a list", node)
        return NUMBER
    # what has the method is a tensor, whatever else it might have been
    given = Tensor(shared=value.shared, foreign=value.foreign)
    return tensors.aten(machine, name, [given, *args], keywords, node)


def _of_list(
    machine: Machine,
    ref: Ref,
    held: List,
    name: str,
    args: list[Value],
    node: ast.AST,
) -> Value:
    if name == "append":
        containers.append(machine, ref, args[0], node)
        return Known(None)
    if name == "copy":
        return functions.RULES[id(list)](machine, [ref], {}, node)
    if name == "extend":
        return _extend(machine, ref, held, args[0], node)
    if name == "clear" and machine.own(held) and held.made == machine.turns():
        machine.now.heap[ref.number] = List((), made=held.made, lane=held.lane)
        return Known(None)
    raise machine.refusal(f"it calls {name} of a list", node)


def _extend(
    machine: Machine, ref: Ref, held: List, more: Value, node: ast.AST
) -> Value:
    over = containers.lanes_of(machine, more, node)
    if over is None:
        items = containers.spread(machine, more, machine.site(node), node)
        if machine.own(held) and isinstance(items, list):
            for x in items:
                containers.append(machine, ref, x, node)
            return Known(None)
        if machine.own(held) and isinstance(items, Many):
            containers.append(machine, ref, items.item, node)
            kept = machine.now.heap[ref.number]
            assert isinstance(kept, List)
            from .memory import loose

            known = [*(kept.items or ()), *([kept.many] if kept.many else [])]
            machine.now.heap[ref.number] = loose(kept, known)
            return Known(None)
        raise machine.refusal("it adds to a list what is not known", node)
    if machine.lane is not None:
        raise machine.refusal("it uses all lanes within a loop over lanes", node)
    from .statements import over_lanes

    def add(x: Value) -> None:
        containers.append(machine, ref, x, node)

    over_lanes(machine, over, add, node, frozenset())
    return Known(None)


def _of_dict(
    machine: Machine,
    ref: Ref,
    held: Dict,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    if held.broken:
        raise machine.refusal(held.broken, node)
    if name in ("get", "setdefault", "pop"):
        default = args[1] if len(args) > 1 else Known(None)
        known = isinstance(args[0], Known) and held.other is None
        found = held.get(args[0].value) if isinstance(args[0], Known) else None
        if known and found is None:
            if name == "setdefault":
                containers.store_ref(machine, ref, args[0], default, node)
            return default
        result = containers.ref_item(machine, ref, args[0], node)
        if not known:
            result = join(result, default, Level.KIND)
        if name == "get" or (name == "setdefault" and known):
            return result
        raise machine.refusal(f"it calls {name} of a dict", node)
    if name in ("items", "keys", "values") and held.other is None:
        pairs = {
            "items": [Items((Known(k), v)) for k, v in held.items],
            "keys": [Known(k) for k, _ in held.items],
            "values": [v for _, v in held.items],
        }
        return Items(tuple(pairs[name]))
    if name == "update" and not args:
        for key, value in keywords.items():
            containers.store_ref(machine, ref, Known(key), value, node)
        return Known(None)
    raise machine.refusal(f"it calls {name} of a dict", node)


def _of_state(
    machine: Machine,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    if name == "get":
        default = args[1] if len(args) > 1 else Known(None)
        return containers.state_item(machine, args[0], node, default)
    if name == "setdefault":
        containers.store_state(machine, args[0], args[1], node)
        return containers.state_item(machine, args[0], node)
    if name == "update":
        if args:
            held = machine.held(args[0], node) if isinstance(args[0], Ref) else None
            if not isinstance(held, Dict) or held.other is not None:
                raise machine.refusal(
                    "the state of a lane is given what is not known", node
                )
            for key, value in held.items:
                containers.store_state(machine, Known(key), value, node)
        for word, value in keywords.items():
            containers.store_state(machine, Known(word), value, node)
        return Known(None)
    if name == "keys":
        return Many(Data(Level.KIND, frozenset({str})), Level.KIND)
    if name == "pop" and isinstance(args[0], Known):
        default = args[1] if len(args) > 1 else None
        return containers.state_item(machine, args[0], node, default)
    raise machine.refusal(f"it calls {name} of a state", node)


def _of_group(
    machine: Machine, group: Group, name: str, args: list[Value], node: ast.AST
) -> Value:
    if name == "get":
        default = args[1] if len(args) > 1 else Known(None)
        key = args[0]
        if isinstance(key, Known) and ("group", key.value) not in machine.world.written:
            if not any(key.value in g for g in machine.world.groups):
                return default
        return containers.group_item(machine, group, key, node, default)
    if name == "setdefault":
        containers.store_item(machine, group, args[0], args[1], node)
        return containers.group_item(machine, group, args[0], node)
    raise machine.refusal(f"it calls {name} of a group", node)


def _of_grouped(machine: Machine, value: Grouped, name: str, node: ast.AST) -> Value:
    if name not in ("items", "values"):
        raise machine.refusal(f"it calls {name} of lanes that were sorted", node)
    return Method(value, f"each of {name}")


def _of_held(
    machine: Machine, held: Held, name: str, args: list[Value], node: ast.AST
) -> Value:
    x = machine.world.object(held)
    written = held.number in machine.world.written
    if isinstance(x, dict) and name == "get":
        default = args[1] if len(args) > 1 else Known(None)
        level = containers.key_level(machine, args[0], node)
        if isinstance(args[0], Known) and not written:
            if args[0].value in x:
                return containers.held_item(machine, held, args[0], node)
            return default
        found = containers.held_item(machine, held, args[0], node)
        return usable(machine, join(found, default, level), node)
    if isinstance(x, dict) and name in ("items", "keys", "values") and not written:
        value = machine.world.value
        rows: list[Value] = []
        for k, v in x.items():
            pair = value(k, held.name), value(v, f"{held.name}[{k!r}]")
            rows.append(
                Items(pair) if name == "items" else pair[0 if name == "keys" else 1]
            )
        if len(rows) <= 16:
            return Items(tuple(rows))
    if isinstance(x, list) and name == "append":
        objects.write(machine, held.number, args[0], node)
        return Known(None)
    if name in ("index", "count", "copy") and not written:
        level = max([containers.key_level(machine, y, node) for y in args], default=0)
        return Data(Level(level))
    raise machine.refusal(f"it calls {name} of {held.name}", node)


def _of_data(
    machine: Machine,
    value: Value,
    name: str,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    found = functions.compute(machine, [value, *args, *keywords.values()], node)
    level = level_of(found)
    assert level is not None
    kinds = types_of(value) or frozenset()
    if level == Level.NUMBER and name not in ("is_integer", "conjugate"):
        raise machine.refusal("it makes text of contents of a tensor", node)
    known = [value, *args, *keywords.values()]
    if all(isinstance(x, Known) and isinstance(x.value, PLAIN) for x in known):
        words = {k: v.value for k, v in keywords.items()}  # type: ignore[attr-defined]
        result = getattr(value.value, name)(*(x.value for x in args), **words)  # type: ignore
        if isinstance(result, PLAIN):
            return machine.world.value(result, name)
    if torch.Size in kinds:
        return Data(level, frozenset({int}))
    text = (
        name
        in (
            "lower upper strip lstrip rstrip replace format join removeprefix removesuffix"
        ).split()
    )
    truth = name in ("startswith", "endswith", "isdigit", "is_integer")
    return Data(
        level, frozenset({str}) if text else frozenset({bool}) if truth else None
    )


_ = (Count, Groups, uniform)
