"""What the patches of Dynamo have learned in this process, in one object.

Whoever asks Dynamo to do something otherwise while it traces has nowhere else to keep
what it has learned: the patched functions outlive every trace and every optimizer. All
of it is weak: it goes with the code and the optimizers that it tells of. What belongs
to the trace that is under way in a thread is in tracing.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.optim import Optimizer


def _to_nobody(*_: Any) -> None:
    """Nobody wants to be told."""


class Watched:
    """What is known of code and optimizers that Dynamo has traced.

    `meetings`: by code and instruction, where the ways of a branch meet. `one_way`: by
    code, the instructions of branches both of whose ways cannot be traced. `counters`:
    by code, patterns of where the integers are found that it counts. `refused`: why
    Dynamo may not trace the steps of optimizers, which showed while it did. `shadows`:
    by what stands for an optimizer in a trace, its shadow, weakly. `plain`: the plain
    code of steps. `tell_of_...`: whom to call when Dynamo ends a graph,
    reaches its limit, or fails, and when a trace is refused. `ask`: has Dynamo say when
    it traces.
    """

    def __init__(self) -> None:
        self.meetings: weakref.WeakKeyDictionary[CodeType, dict[int, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.one_way: weakref.WeakKeyDictionary[CodeType, set[int]] = (
            weakref.WeakKeyDictionary()
        )
        self.counters: weakref.WeakKeyDictionary[CodeType, set[str]] = (
            weakref.WeakKeyDictionary()
        )
        self.refused: weakref.WeakKeyDictionary[Optimizer, str] = (
            weakref.WeakKeyDictionary()
        )
        self.shadows: weakref.WeakKeyDictionary[Optimizer, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self.plain: weakref.WeakKeyDictionary[Optimizer, Any] = (
            weakref.WeakKeyDictionary()
        )
        self.ask: Callable[[], None] = _to_nobody
        self.tell_of_break: Callable[..., None] = _to_nobody
        self.tell_of_limit: Callable[..., None] = _to_nobody
        self.tell_of_failure: Callable[..., None] = _to_nobody
        self.tell_of_refusal: Callable[..., None] = _to_nobody


watched = Watched()
