"""Integers that a step counts stay symbols while Dynamo traces it."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from typing import Any

import torch

from .dynamo import traces_step
from .hooks import Hook, around


class _Symbolic(threading.local):
    """The integers that are to be symbols, in this thread."""

    def __init__(self) -> None:
        self.values: frozenset[int] = frozenset()


_symbolic = _Symbolic()
_hooked: list[bool] = []


def take_for_symbols(values: frozenset[int]) -> None:
    """Let Dynamo, in this thread and from now on, take these integers, where it finds
    them in the state of a parameter, for any numbers; nothing else may be one of them.
    """
    _symbolic.values = values


def can_stay_symbolic() -> bool:
    """Does Dynamo ask, where `keep_symbolic` has put its question?"""
    return bool(_hooked)


def keep_symbolic() -> None:
    """Let `take_for_symbols` have its effect.

    Relies on the function by which Dynamo asks whether a number has changed before, and
    on what it answers (torch 2.11.0, 2.13.0); where they are others `can_stay_symbolic`
    says so.
    """
    builder: Any = importlib.import_module("torch._dynamo.variables.builder")
    changing = importlib.import_module("torch._dynamo.pgo").auto_dynamic

    def asked(original: Hook, tx: Any, name: str, entry: Any, **more: Any) -> Any:
        value = getattr(entry, "scalar", None)
        ours = type(value) is int and value in _symbolic.values and traces_step()
        if ours and name.startswith("L['self'].state["):
            return dataclasses.replace(entry, scalar=changing)
        return original(tx, name, entry, **more)

    around(builder, "process_automatic_dynamic", asked)
    _hooked.append(True)


def stay_symbolic(gm: torch.fx.GraphModule, values: frozenset[int]) -> bool:
    """Is a graph the same whatever these numbers are?

    Relies on what Dynamo knows of the symbols of a graph; False where it is elsewhere.
    """
    if not values:
        return True
    for node in gm.graph.find_nodes(op="placeholder"):
        number = node.meta.get("example_value")
        if not isinstance(number, torch.SymInt):
            continue
        try:
            known: Any = number.node.shape_env
            expr = number.node.expr
            hint = number.node.hint
            asked = {x for guard in known.guards for x in guard.expr.free_symbols}
            replaced = known.replacements
        except AttributeError:
            return False
        if hint in values and (expr in asked or expr in replaced):
            return False
    return True
