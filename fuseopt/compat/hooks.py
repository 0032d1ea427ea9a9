"""Install guards while Dynamo traces a step for our backend.

Relies on the functions by which Dynamo installs guards, and on its expressions for the
source of a value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .names import find
from .tracing import traces_own, traces_step

TORCH = os.path.dirname(torch.__file__) + os.sep


def is_ours(tx: Any) -> bool:
    """Is this a trace of ours, of code outside of torch?"""
    if not traces_step():
        return False
    now = getattr(tx.output, "current_tx", tx)
    return traces_own() or not now.f_code.co_filename.startswith(TORCH)


def install(source: Any, *kinds: Any) -> None:
    """Guard the value at a source, in these ways."""
    if source is not None:
        for kind in kinds:
            guard_here(source, kind)


def guard_here(source: Any, kind: Any) -> Any:
    """Guard the value at a source, and return the guard.

    Returns None if the source cannot have guards.
    """
    try:
        guard = source.make_guard(kind)
    except NotImplementedError:
        return None
    guard_again(guard)
    return guard


def guard_again(guard: Any) -> None:
    """Install a guard if it is missing: Dynamo removes guards when it rolls back a
    trace.
    """
    if guard is not None:
        find("torch._dynamo.guards:install_guard")(guard)


def name_of(source: Any) -> str:
    """Return the expression for the value at a source."""
    return str(source.name() if callable(source.name) else source.name)


def found_at(tx: Any, source: Any) -> Any:
    """Return the value at a source; None if it cannot be evaluated."""
    if source is None:
        return None
    scope = {"L": tx.output.local_scope, "G": tx.output.global_scope}
    try:
        return eval(name_of(source), scope)
    except Exception:
        return None


def guard_once(tx: Any, what: str, holds: Callable[[], bool]) -> None:
    """Guard that `holds()` at each call; once per graph and name."""
    guarded = vars(tx.output).setdefault("fuseopt_guarded", set())
    if what in guarded:
        return
    guarded.add(what)
    source = find("torch._dynamo.source:GlobalStateSource")()

    def create(builder: Any, guard: Any) -> None:
        root = builder.guard_manager.root
        add_lambda(root, lambda _: holds(), [what], guard.user_stack)

    install(source, create)


def add_lambda(
    manager: Any, holds: Callable[[Any], bool], parts: list[str], stack: Any
) -> None:
    """Add a guard that calls a function; `parts`: its description in Dynamo's log."""
    try:
        manager.add_lambda_guard(holds, parts, stack)
    except TypeError:  # as before torch 2.13
        manager.add_lambda_guard(holds, parts)


def all_kinds(base: type[Any]) -> Iterator[type[Any]]:
    """Yield a class and all classes derived from it."""
    yield base
    for kind in base.__subclasses__():
        yield from all_kinds(kind)
