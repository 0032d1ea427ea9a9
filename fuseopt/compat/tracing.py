"""What is set in a thread while Dynamo traces a step."""

from __future__ import annotations

import threading
from typing import Any

import torch


class Tracing(threading.local):
    """What was set for the trace that runs in this thread, for one thread alone.

    `hooked`: what stands for the trace while hooks are in force for it. `patches`: what
    is to be taken back when it ends. `own`: is the step that of an
    optimizer that is not torch's? `owners`: whose steps they are. `counted`: integers
    that are to be symbols; `asks`: does the trace hold only for some of their values?
    `constants`: are numbers constants, as Dynamo has them?
    `symbols`: where the numbers are found that the trace has as symbols. `as_if`:
    how many steps run, one within the other, as if they were compiled? `stores`: the
    attributes of optimizers that the trace writes; `stored`: those that are kept.
    `given`: what stands for optimizers in a step that fuseopt has Dynamo trace. `cuts`:
    where Dynamo ends graphs, while somebody wants to know. `refusal`: why the trace was
    refused, until Dynamo has ended the graph there. `writing`: does Dynamo write down
    what the step leaves behind?
    """

    def __init__(self) -> None:
        self.hooked: object = None
        self.patches: list[Any] = []
        self.own = False
        self.owners: list[torch.optim.Optimizer] = []
        self.counted: frozenset[int] = frozenset()
        self.asks = False
        self.constants = False
        self.symbols: list[str] = []
        self.as_if = 0
        self.stores: set[str] = set()
        self.stored: set[str] = set()
        self.given: list[torch.optim.Optimizer] = []
        self.cuts: list[Any] | None = None
        self.refusal = ""
        self.writing = False

    def leave(self) -> None:
        """Take back what was set for a trace, which has ended."""
        self.owners = []
        self.refusal = ""
        self.stores, self.stored = set(), set()
        while self.patches:
            self.patches.pop().__exit__(None, None, None)


tracing = Tracing()


def traces_step() -> bool:
    """Is Dynamo, in this thread, tracing code of an optimizer's step?"""
    return bool(tracing.patches)


def traces_own() -> bool:
    """Is it the step of an optimizer that is not torch's own?"""
    return tracing.own and traces_step()
