"""Calls: functions with Python source are walked, others have a rule or are refused."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import torch

from .. import compat
from ..compiler.code_paths import is_known
from . import functions, methods, tensors, torch_functions
from .machine import DEPTH, Definition, Frame, Machine, Raises, usable
from .memory import Dict, Memory, meet, merge
from .sequences import Branch
from .source import NoSource, Source, inner_codes
from .values import (
    Bound,
    Choice,
    Closure,
    Data,
    Items,
    Known,
    Level,
    Method,
    Optimizer,
    Tensor,
    Value,
    join,
)

#: Modules of the function classes that the analysis may inspect.
_HOMES = ("builtins", "functools", "abc", "enum", "typing", "torch")
#: Context managers that `with` may enter: they treat all lanes alike.
CONTEXTS = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
_MODES = (*CONTEXTS, torch.inference_mode)


def call(
    machine: Machine,
    function: Value,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    """Return the value of a call. Refuses functions that are not certain."""
    usable(machine, function, node)
    for value in (*args, *keywords.values()):
        usable(machine, value, node)
    if isinstance(function, Bound):
        return call(machine, function.function, [function.first, *args], keywords, node)
    if isinstance(function, Method):
        return methods.method(machine, function.of, function.name, args, keywords, node)
    if isinstance(function, Closure):
        return _closure(machine, function, args, keywords, node)
    if isinstance(function, Choice):
        first, *rest = function.of

        def others() -> Value:
            callee = rest[0] if len(rest) == 1 else Choice(tuple(rest))
            return call(machine, callee, args, keywords, node)

        return machine.either(
            Level.UNIFORM,
            node,
            lambda: call(machine, first, args, keywords, node),
            others,
        )
    if isinstance(function, Known):
        return _call_known(machine, function.value, args, keywords, node)
    raise machine.refusal("it calls an unknown function", node)


@contextmanager
def _arguments(machine: Machine, node: ast.AST) -> Iterator[None]:
    """Refuse a call that lacks an argument: rules index their arguments."""
    try:
        yield
    except (IndexError, KeyError):
        why = "it calls a function with unknown arguments"
        raise machine.refusal(why, node) from None


def _call_known(
    machine: Machine,
    function: Any,
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> Value:
    kind = type(function)
    if str(kind.__module__).partition(".")[0] not in _HOMES:
        # its `__name__` and `__eq__` may be user code
        raise machine.refusal(f"it calls a {kind.__name__}", node)
    # Dynamo wraps functions that it must not trace. It either runs them, as
    # `_init_group`, or does not trace the step of the leading lanes
    function = getattr(function, "_torchdynamo_orig_callable", function)
    entry = functions.RULES.get(id(function))
    if entry is not None:
        with _arguments(machine, node):
            return entry[1](machine, args, keywords, node)
    if tensors.is_foreach(function):
        return torch_functions.foreach(machine, function.__name__, args, keywords, node)
    name = tensors.is_aten(function)
    if name is not None:
        return tensors.aten(machine, name, args, keywords, node)
    if isinstance(function, types.MethodType):
        first = machine.world.value(function.__self__, "self")
        if function.__self__ is machine.world.optimizer:
            first = Optimizer()
        usable(machine, first, node)
        return _call_known(machine, function.__func__, [first, *args], keywords, node)
    if isinstance(function, types.MethodDescriptorType) and args:
        owner = function.__objclass__
        if issubclass(torch.Tensor, owner) and isinstance(args[0], Tensor):
            return methods.method(
                machine, args[0], function.__name__, args[1:], keywords, node
            )
    if isinstance(function, types.FunctionType):
        return _function(machine, function, args, keywords, node)
    if function in CONTEXTS:
        return Data(Level.UNIFORM)
    what = getattr(function, "__qualname__", type(function).__name__)
    raise machine.refusal(f"it calls {what}, an unsupported type", node)


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
        raise machine.refusal("a function has an unknown decorator", node)
    if code in (compat.GRAD_MODE, compat.PROFILED, compat.FALLBACK):
        return call(machine, Known(_cell(function, "func")), args, keywords, node)
    frame = frame_of(machine, function, node)
    bind(machine, frame, function, args, keywords, node)
    return run(machine, frame, node)


def frame_of(machine: Machine, function: types.FunctionType, node: ast.AST) -> Frame:
    """Make a frame for a Python function, without its arguments. Refuses recursion."""
    try:
        source = machine.sources.of(function)
    except NoSource as error:
        raise machine.refusal(f"{function.__qualname__}: {error}", node) from error
    if any(f.source.node is source.node for f in machine.frames):
        raise machine.refusal("it is recursive", node)
    code = function.__code__
    if not is_known(code):
        machine.codes |= inner_codes(code)
    cells: dict[str, Any] = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            cells[name] = cell.cell_contents
        except ValueError:
            raise machine.refusal(
                f"{name} of {function.__qualname__} is unknown", node
            ) from None
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
    """Set a function's parameters in its frame, from arguments and defaults."""
    signature = frame.source.node.args
    defaults = function.__defaults__ or ()
    names = [a.arg for a in (*signature.posonlyargs, *signature.args)]
    title = function.__qualname__
    values: dict[str, Value] = {
        name: machine.world.value(x, f"a default of {title}")
        for name, x in zip(names[len(names) - len(defaults) :], defaults, strict=True)
    }
    for name, x in (function.__kwdefaults__ or {}).items():
        values[name] = machine.world.value(x, f"a default of {title}")
    _bind(machine, frame, signature, values, args, keywords, node)


def _bind(
    machine: Machine,
    frame: Frame,
    signature: ast.arguments,
    values: dict[str, Value],
    args: list[Value],
    keywords: dict[str, Value],
    node: ast.AST,
) -> None:
    names = [a.arg for a in (*signature.posonlyargs, *signature.args)]
    keyword_only = [a.arg for a in signature.kwonlyargs]
    if names and args:
        frame.first = args[0]
    surplus = args[len(names) :]
    values.update(zip(names, args, strict=False))
    surplus_keywords: dict[str, Value] = {}
    for name, value in keywords.items():
        if name in names or name in keyword_only:
            values[name] = value
        else:
            surplus_keywords[name] = value
    if (surplus and signature.vararg is None) or (
        surplus_keywords and signature.kwarg is None
    ):
        raise machine.refusal(
            "it calls a function with arguments that do not fit", node
        )
    if signature.vararg is not None:
        values[signature.vararg.arg] = Items(tuple(surplus))
    if signature.kwarg is not None:
        values[signature.kwarg.arg] = machine.new(Dict(tuple(surplus_keywords.items())))
    for name in (*names, *keyword_only):
        if name not in values:
            raise machine.refusal(
                "it calls a function with arguments that do not fit", node
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
    definition: Definition = machine.definitions[function.number]
    if any(f.source.node is definition.node for f in machine.frames):
        raise machine.refusal("it is recursive", node)
    outer = definition.frames[-1]
    source = Source(definition.node, outer.source.filename, outer.source.code)
    frame = Frame(
        source,
        machine.scope(),
        local_names(definition.node),
        outer.globals,
        outer.cells,
        definition.frames,
        owner=outer.owner,
    )
    signature = definition.node.args
    names = [a.arg for a in (*signature.posonlyargs, *signature.args)]
    defaults = definition.defaults
    values = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    values.update(definition.keyword_defaults)
    _bind(machine, frame, signature, values, args, keywords, node)
    return run(machine, frame, node)


def local_names(node: ast.AST) -> frozenset[str]:
    """Return the variables of a function that the step defines."""
    bound: set[str] = set()
    outside: set[str] = set()
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        signature = node.args
        bound |= {
            a.arg
            for a in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs)
        }
        bound |= {a.arg for a in (signature.vararg, signature.kwarg) if a is not None}
    body = node.body if isinstance(node, ast.FunctionDef) else []
    for x in stored(body):
        if isinstance(x, (ast.Global, ast.Nonlocal)):
            outside |= set(x.names)
        elif isinstance(x, ast.Name):
            bound.add(x.id)
        elif isinstance(x, ast.FunctionDef):
            bound.add(x.name)
        elif isinstance(x, ast.alias):
            bound.add(x.asname or x.name.partition(".")[0])
        elif isinstance(x, ast.ExceptHandler) and x.name:
            bound.add(x.name)
    return frozenset(bound - outside)


def stored(body: Seq[ast.AST]) -> list[ast.AST]:
    """Return the nodes in statements that set variables, no nested functions."""
    targets: list[ast.AST] = []
    pending = list(body)
    while pending:
        x = pending.pop()
        if isinstance(x, ast.FunctionDef):
            targets.append(x)
            continue
        if isinstance(x, ast.Lambda):
            continue
        if (
            isinstance(x, ast.Name) and isinstance(x.ctx, (ast.Store, ast.Del))
        ) or isinstance(x, (ast.Global, ast.Nonlocal, ast.alias, ast.ExceptHandler)):
            targets.append(x)
        pending.extend(ast.iter_child_nodes(x))
    return targets


def run(machine: Machine, frame: Frame, node: ast.AST) -> Value:
    """Walk the body of a function whose arguments are set; return its joined result."""
    if len(machine.frames) >= DEPTH:
        raise machine.refusal("its calls are nested too deeply", node)
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
    result: Value | None = None
    worst = Level.UNIFORM
    # a path that no earlier return has taken reaches the last one
    for k, (value, after, level) in enumerate(reversed(frame.returns)):
        worst = max(worst, level)
        if result is not None and memory is not None and after is not None:
            result = meet(result, value, worst, (memory, after))
        else:
            result = value if result is None else join(result, value, worst)
        branch = Branch((*machine.site(node), "return", k), machine.turns())
        memory = merge(memory, after, worst, branch)
    machine.memory = memory
    if memory is None:
        raise Raises
    if not any(
        frame is x for definition in machine.definitions for x in definition.frames
    ):
        memory.scopes.pop(frame.scope, None)
    return Known(None) if result is None else result
