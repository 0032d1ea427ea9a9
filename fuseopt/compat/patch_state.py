"""Facts that the patches of Dynamo collect in this process, in one object.

The patched functions outlive every trace and every optimizer, so they need such a
place. All references are weak: an entry ends with its code or optimizer. State of the
running trace of a thread is in tracing.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch.optim import Optimizer


def _to_nobody(*_: Any) -> None:
    """Do nothing, before a callback is registered."""


class PatchState:
    """Facts about code and optimizers that Dynamo has traced.

    `meetings`: by code and instruction, where the ways of a branch meet.
    `counters`: by code, patterns of the sources of integers that it counts.
    `refused`: why Dynamo may not trace the steps of optimizers, as a trace has shown.
    `shadows`: by the stand-in of an optimizer in a trace, its shadow, weakly.
    `plain`: the plain code of steps.
    `report_...`: callbacks for graph breaks, the recompile limit, failures of Dynamo,
        and refused traces.
    `register`: registers for the start of each trace.
    `allocate`: allocates the memory of a stand-in's tensors, which a trace reads.
    """

    def __init__(self) -> None:
        self.meetings: weakref.WeakKeyDictionary[CodeType, dict[int, Any]] = (
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
        self.register: Callable[[], None] = _to_nobody
        self.allocate: Callable[[Any], None] = _to_nobody
        self.report_break: Callable[..., None] = _to_nobody
        self.report_limit: Callable[..., None] = _to_nobody
        self.report_failure: Callable[..., None] = _to_nobody
        self.report_refusal: Callable[..., None] = _to_nobody


patch_state = PatchState()
