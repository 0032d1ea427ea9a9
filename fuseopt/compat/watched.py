"""What the patches of Dynamo have learned in this process, in one object.

Whoever asks Dynamo to do something otherwise while it traces has nowhere else to keep
what it has learned: the patched functions outlive every trace and every optimizer. All
of it is weak: it goes with the code and the optimizers that it tells of. What belongs
to the trace that is under way in a thread is in tracing.py.
"""

from __future__ import annotations

import weakref
from types import CodeType
from typing import Any

from torch.optim import Optimizer


class Watched:
    """What is known of code and optimizers that Dynamo has traced.

    `meetings`: by code and instruction, where the ways of a branch meet. `one_way`: by
    code, the instructions of branches both of whose ways cannot be traced. `counters`:
    by code, patterns of where the integers are found that it counts. `refused`: why
    Dynamo may not trace the steps of optimizers, which showed while it did. `shadows`:
    by what stands for an optimizer in a trace, its shadow, weakly. `asks_of_integers`:
    has Dynamo been given the question which integers are to be symbols?
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
        self.asks_of_integers = False


watched = Watched()
