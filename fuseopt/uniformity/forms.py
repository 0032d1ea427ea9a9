"""Handlers of statements, by form, and `execute`, which walks statements."""

from __future__ import annotations

import ast
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any, TypeVar

from .machine import Machine, Raises

F = TypeVar("F", bound=Callable[..., Any])
Form = Callable[[Machine, Any], None]
FORMS: dict[type, Form] = {}
#: Handlers of loops. They also get the statements after the loop, and return whether
#: they have walked them.
LOOPS: dict[type, Callable[[Machine, Any, Seq[ast.stmt]], bool]] = {}


def into(forms: dict[type, F]) -> Callable[..., Callable[[F], F]]:
    """Make a decorator that registers a function as the handler of some node types."""

    def form(*kinds: type) -> Callable[[F], F]:
        def take(function: F) -> F:
            forms.update(dict.fromkeys(kinds, function))
            return function

        return take

    return form


form = into(FORMS)


def execute(machine: Machine, body: Seq[ast.stmt]) -> None:
    """Walk statements; `memory` becomes None if their end is unreachable."""
    for k, node in enumerate(body):
        if machine.memory is None:
            return
        machine.spend(node)
        loop, plain = LOOPS.get(type(node)), FORMS.get(type(node))
        try:
            if loop is not None:
                if loop(machine, node, body[k + 1 :]):
                    return
            elif plain is not None:
                plain(machine, node)
            else:
                raise machine.refusal(f"a {type(node).__name__} is not analysed", node)
        except Raises:
            machine.memory = None
