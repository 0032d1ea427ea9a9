"""State of a thread while Dynamo traces a step."""

from __future__ import annotations

import threading
from types import CodeType
from typing import Any

import torch


class Tracing(threading.local):
    """State of the trace that runs in this thread.

    `hooked`: a token of the trace while hooks are in force for it.
    `patches`: contexts to leave when it ends.
    `own`: True for the step of an optimizer outside of torch.
    `owners`: the optimizers of the step.
    `counted`: integers that are to be symbols; `restricted`: True if the trace holds
        only for some of their values.
    `constants`: True if numbers are constants, as in Dynamo.
    `symbols`: the sources of the trace's symbols.
    `as_if`: the number of nested steps that run as if they were compiled.
    `stores`: the attributes of optimizers that the trace writes; `stored`: those that
        are kept.
    `given`: stand-ins of optimizers in a step that fuseopt makes Dynamo trace.
    `cuts`: graph breaks, while a caller collects them.
    `refusal`: why the trace was refused, until Dynamo has ended the graph there.
    `writing`: True while Dynamo writes down the step's side effects.
    `one_way`: by code, the instructions of branches both of whose ways this trace
        cannot follow. Another one may: with other objects, or another capability.
    """

    def __init__(self) -> None:
        self.hooked: object = None
        self.patches: list[Any] = []
        self.own = False
        self.owners: list[torch.optim.Optimizer] = []
        self.counted: frozenset[int] = frozenset()
        self.restricted = False
        self.constants = False
        self.symbols: list[str] = []
        self.as_if = 0
        self.stores: set[str] = set()
        self.stored: set[str] = set()
        self.given: list[torch.optim.Optimizer] = []
        self.cuts: list[Any] | None = None
        self.refusal = ""
        self.writing = False
        self.one_way: dict[CodeType, set[int]] = {}

    def leave(self) -> None:
        """Reset the state after a trace has ended."""
        self.owners = []
        self.refusal = ""
        self.stores, self.stored = set(), set()
        self.one_way.clear()
        while self.patches:
            self.patches.pop().__exit__(None, None, None)


tracing = Tracing()


def traces_step() -> bool:
    """Is Dynamo, in this thread, tracing code of an optimizer's step?"""
    return bool(tracing.patches)


def traces_own() -> bool:
    """Is it the step of an optimizer outside of torch?"""
    return tracing.own and traces_step()
