"""What this process has compiled: reports, built kernels, graphs, warnings given."""

from __future__ import annotations

import atexit
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..runtime.cpp.build import Builder
from ..runtime.cpp.vector import Vectors
from .report import Report

#: So many Reports are kept of optimizers that are no more.
RETIRED = 16
#: What so many dropped optimizers leave waits for the collector of garbage.
UNCOLLECTED = 16
#: The attribute that marks a step which fuseopt.compile made.
COMPILED = "_fuseopt"


class Session:
    """What this process has compiled: reports, built kernels, captured graphs."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.vectors = Vectors()
        self.reports: list[Report] = []
        self.retired: list[Report] = []  # of optimizers that are no more
        self.uncollected = 0  # dropped optimizers since the last collection
        self.warned: set[str] = set()
        self.mishaps: list[str] = []  # errors of fuseopt's own
        #: what stands for optimizers whose steps are compiled apart from all others
        self.apart: weakref.WeakSet[Any] = weakref.WeakSet()
        #: those of them whose tensors have no memory, and what gives them some, which
        #: Dynamo wants while it traces
        self.hollow: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: why steps run in eager, as was told
        self.eager: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        #: those who step in the backward
        self.in_backward: weakref.WeakSet[Any] = weakref.WeakSet()
        #: of an optimizer that has one, its tail, weakly
        self.tails: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: of the first parameter that has a gradient, by all of them: what clips these
        self.clips: MutableMapping[torch.Tensor, dict[Any, Any]] = WeakIdKeyDictionary()
        #: optimizers of whose steps Dynamo has ended a graph
        self.cut: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.cached_property
    def triton_builder(self) -> Any:
        """Made on first use, so that a CPU never imports Triton."""
        from ..runtime.triton.build import TritonBuilder

        return TritonBuilder()

    @functools.cached_property
    def graphs(self) -> Any:
        """Made on first use. Graphs end before the libraries that they call do."""
        from ..runtime.cudagraphs import Graphs

        made = Graphs()
        atexit.register(made.release)
        return made

    def retire(self, reports: list[Report]) -> None:
        """These tell of an optimizer that is no more: the last ones are kept."""
        self.retired += [report for report in reports if report in self.reports]
        gone = set(map(id, self.retired[:-RETIRED]))
        if gone:
            del self.retired[:-RETIRED]
            self.reports[:] = [x for x in self.reports if id(x) not in gone]

    def collect(self) -> None:
        """Collect what dropped optimizers left, before another one is compiled.

        torch's graphs are cycles. While it traces, the collector is off, and what it
        collects itself keeps Python's own count of new objects at 0: a program that
        makes optimizers and little else never came to a full collection.
        """
        if self.uncollected >= UNCOLLECTED and gc.isenabled():
            self.uncollected = 0
            gc.collect()

    def reset(self) -> None:
        if "graphs" in self.__dict__:
            self.graphs.release()
        self.reports.clear()
        self.retired.clear()
        self.warned.clear()
        self.eager.clear()
        self.cut.clear()
        self.mishaps.clear()

    def warn_once(self, message: str, about: str = "") -> None:
        """Warn, unless that was done before about the same."""
        if (about or message) not in self.warned:
            self.warned.add(about or message)
            warnings.warn(message, RuntimeWarning, stacklevel=3)


session = Session()


def reports() -> list[Report]:
    """The Reports of what was compiled in this process, oldest first.

    Of optimizers that were given to fuseopt.compile and are no more: the last 16.
    """
    return list(session.reports)
