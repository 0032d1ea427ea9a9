"""Schemas of ATen ops, and the arguments that a call of a graph changes.

Relies on `OpOverload._schema` and its `tags`, as torch.library documents schemas. For
functions without a schema it relies on torch's and Python's names of in-place
functions. A function with neither is assumed to change nothing.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from .tensors import GRAD_SWITCH

#: Functions of `operator` that change their first argument.
INPLACE_OPERATORS = frozenset({"iand", "ior", "setitem"}) | {
    name
    for name in vars(operator)
    if name[0] == "i" and callable(getattr(operator, name[1:], None))
}


class Schema(NamedTuple):
    """Facts about an op before it is called.

    `name`: with its namespace, without its overload. Arguments by name, type and
    default. `writes`: the arguments that it changes, by position and name. `returns`:
    the number of results. `views`: one result shares memory with an argument that it
    does not change. `reshapes`: it changes the layout of its argument, and no memory.
    `seeded`: it depends on the state of a generator.
    """

    name: str
    arguments: tuple[str, ...]
    types: tuple[str, ...]
    defaults: tuple[Any, ...]
    writes: tuple[tuple[int, str], ...]
    returns: int
    views: bool
    reshapes: bool
    seeded: bool


@functools.lru_cache(maxsize=4096)
def schema_of(target: Any) -> Schema | None:
    """Return the schema of an OpOverload; None for other functions."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return None
    arguments, returns = schema.arguments, schema.returns
    tags = getattr(target, "tags", ())
    return Schema(
        schema.name,
        tuple(a.name for a in arguments),
        tuple(str(a.type) for a in arguments),
        tuple(a.default_value for a in arguments),
        tuple((i, a.name) for i, a in enumerate(arguments) if _is_written(a)),
        len(returns),
        any(r.alias_info is not None and not _is_written(r) for r in returns),
        torch.Tag.inplace_view in tags,
        torch.Tag.nondeterministic_seeded in tags,
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def name_of(target: Any) -> str:
    """Return the name of a function, or of the method that a string names."""
    return str(getattr(target, "__name__", target))


@functools.lru_cache(maxsize=4096)
def changes_first(target: Any) -> bool:
    """Does a function or method without a schema change its first argument?"""
    name = name_of(target)
    by_name = name.endswith("_") and not name.endswith("__")
    return (by_name or name in INPLACE_OPERATORS) and target is not GRAD_SWITCH


def written(node: Node) -> list[Node]:
    """Return the arguments of a call that it changes in place."""
    if not node.op.startswith("call"):
        return []
    args, kwargs = node.args, node.kwargs
    targets: list[Any] = [kwargs["out"]] if "out" in kwargs else []
    schema = schema_of(node.target)
    if schema is not None:
        for position, name in schema.writes:
            targets.append(args[position] if position < len(args) else kwargs.get(name))
    elif kwargs.get("inplace") is True or changes_first(node.target):
        targets.append(args[0] if args else kwargs.get("self"))
    return _nodes(targets)


def _nodes(x: Any) -> list[Node]:
    if isinstance(x, Node):
        return [x]
    if isinstance(x, (list, tuple)):
        return [n for y in x for n in _nodes(y)]
    return []
