"""Find the closure that a step's function calls before all else.

    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    ...
    return loss

Such a step calls its closure once, and only returns the result. So fuseopt can call the
closure first, and then the step without one, which models can lead. `opening` compares
the syntax tree of the code with this form.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..uniformity.source import NoSource, Sources

#: Methods of torch that only check whether the step may be captured in a graph.
CHECKS = frozenset(
    {"_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"}
)
#: Functions by which code reads variables without writing their names.
LOOKS = frozenset({"locals", "vars", "eval", "exec", "dir"})
_SOURCES = Sources()


def opening(function: Any) -> str:
    """Return the name of the argument that a step's function calls first.

    Returns "" if its code has another form.
    """
    if not isinstance(function, types.FunctionType):
        return ""
    code = function.__code__
    local_names = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if "torch" in local_names or function.__globals__.get("torch") is not torch:
        return ""
    try:
        node = _SOURCES.of(function).node
    except NoSource:
        return ""
    return _opening(node) if isinstance(node, ast.FunctionDef) else ""


def _opening(node: ast.FunctionDef) -> str:
    named = [a.arg for a in node.args.args]
    if not named:
        return ""  # a function of *args, which may replace a method
    itself, *others = named
    empty: set[str] = set()
    for place, statement in enumerate(node.body):
        if _is_text(statement) or _is_check(statement, itself):
            continue
        name = _none_target(statement)
        if name:
            empty.add(name)
            continue
        closure, result = _closure_call(statement)
        rest = node.body[place + 1 :]
        fits = closure in others and result in empty and not empty & {itself, closure}
        return closure if fits and _only_returns(rest, closure, result) else ""
    return ""


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_check(statement: ast.stmt, itself: str) -> bool:
    """Is the statement one of torch's checks, with no effect on a closure?"""
    return any(_same(statement, f"{itself}.{name}()") for name in CHECKS)


def _none_target(statement: ast.stmt) -> str:
    """Return the name to which a statement assigns None, or ""."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    value = getattr(statement, "value", None)
    if len(targets) != 1 or not isinstance(value, ast.Constant):
        return ""
    (target,) = targets
    return target.id if isinstance(target, ast.Name) and value.value is None else ""


def _closure_call(statement: ast.stmt) -> tuple[str, str]:
    """Return the names of closure and result in a statement that calls the closure."""
    match statement:
        case ast.If(
            test=ast.Compare(left=ast.Name(id=closure)),
            body=[ast.With(body=[ast.Assign(targets=[ast.Name(id=result)])])],
        ):
            text = (
                f"if {closure} is not None:\n"
                f"    with torch.enable_grad():\n"
                f"        {result} = {closure}()"
            )
            if closure != result and _same(statement, text):
                return closure, result
    return "", ""


def _same(statement: ast.stmt, text: str) -> bool:
    (wanted,) = ast.parse(text).body
    return ast.dump(statement) == ast.dump(wanted)


def _only_returns(rest: Sequence[ast.stmt], closure: str, result: str) -> bool:
    """Does the rest of a step return the result and do nothing else with either?"""
    if not rest or not isinstance(rest[-1], ast.Return):
        return False
    every = [node for statement in rest for node in ast.walk(statement)]
    returned = [node.value for node in every if isinstance(node, ast.Return)]
    if not all(isinstance(x, ast.Name) and x.id == result for x in returned):
        return False
    returned_ids = {id(x) for x in returned}
    names = {
        text for node in every if id(node) not in returned_ids for text in _texts(node)
    }
    return not names & ({closure, result} | LOOKS)


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield all strings in the fields of a node: its names."""
    for _, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                yield one
