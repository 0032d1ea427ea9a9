"""A module -> the names at its top that its functions change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

#: Methods that change what they are called on.
CHANGES = frozenset(
    (
        "add append clear discard extend insert pop popitem remove setdefault sort "
        "update"
    ).split()
)


class Changed(NamedTuple):
    """Names that functions change: of the module, and imported from its house."""

    own: set[str]
    imported: set[str]


def changed_in_functions(tree: ast.Module) -> Changed:
    """What functions of a module write to, be it an item or an attribute deep within.

    Of an imported name no method is one that changes it: it may be a module.
    """
    own = {x.id for node in tree.body for x in _assigned(node)}
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
        for name in node.names
    }
    found = Changed(set(), set())
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            continue
        local = {x.arg for x in ast.walk(function) if isinstance(x, ast.arg)}
        local |= {
            x.id
            for x in ast.walk(function)
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)
        }
        for name, within in _written(function):
            if within and name in imported - local:
                found.imported.add(name)
            if name in own - local:
                found.own.add(name)
        for node in ast.walk(function):
            if isinstance(node, ast.Global):
                found.own.update(node.names)
    return found


def _assigned(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [x for x in targets if isinstance(x, ast.Name)]


def _written(function: ast.AST) -> Iterator[tuple[str, bool]]:
    """Names, and whether it is something within them that is written to."""
    for node in ast.walk(function):
        target: ast.AST | None = None
        if isinstance(node, (ast.Subscript, ast.Attribute)):
            target = node if isinstance(node.ctx, (ast.Store, ast.Del)) else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in CHANGES else None
        within = isinstance(target, (ast.Subscript, ast.Attribute))
        while isinstance(target, (ast.Subscript, ast.Attribute)):
            target = target.value
        if isinstance(target, ast.Name):
            yield target.id, within
