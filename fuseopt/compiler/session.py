"""What this process has compiled: reports, built kernels, graphs, warnings given."""

from __future__ import annotations

import atexit
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from ..runtime.cpp.build import Builder
from ..runtime.cpp.vector import Vectors
from ..runtime.probes import Probes
from .report import Report

#: The number of Reports that are kept of optimizers that are gone.
RETIRED = 16
#: The number of dropped optimizers after which the garbage collector runs.
UNCOLLECTED = 16
#: The attribute that marks a step which fuseopt.compile made.
COMPILED = "_fuseopt"


class Session:
    """What this process has compiled: reports, built kernels, captured graphs."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.probes = Probes()
        self.vectors = Vectors()
        self.reports: list[Report] = []
        self.retired: list[Report] = []  # of optimizers that are gone
        self.uncollected = 0  # dropped optimizers since the last collection
        self.warned: set[str] = set()
        self.mishaps: list[str] = []  # errors of fuseopt's own
        #: optimizers whose `step` torch.compile was given for fuseopt
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()
        #: shadows of optimizers whose steps are compiled apart from all others
        self.apart: weakref.WeakSet[Any] = weakref.WeakSet()
        #: those of them whose tensors have no memory, with the function that gives them
        #: memory for the time in which Dynamo traces
        self.hollow: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: the reported reason why an optimizer's step runs in eager
        self.eager: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        #: optimizers that fuseopt.compile was given, by identity
        self.compiled: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        #: the clips that are left to steps; None where there are none
        self.deferred: Any = None
        #: optimizers that step in the backward
        self.in_backward: weakref.WeakSet[Any] = weakref.WeakSet()
        #: the tail of an optimizer that has one, weakly
        self.tails: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: what clips gradients, by the id of the first parameter that has one
        self.clips: dict[int, Any] = {}
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
        from ..runtime.sites import Graphs

        graphs = Graphs()
        atexit.register(graphs.release)
        return graphs

    def retire(self, reports: list[Report]) -> None:
        """Add Reports of an optimizer that is gone; only the last RETIRED are kept."""
        self.retired += [report for report in reports if report in self.reports]
        dropped = set(map(id, self.retired[:-RETIRED]))
        if dropped:
            del self.retired[:-RETIRED]
            self.reports[:] = [x for x in self.reports if id(x) not in dropped]

    def collect(self) -> None:
        """Run the garbage collector after UNCOLLECTED dropped optimizers.

        torch's graphs are cycles. Dynamo turns the collector off while it traces, and
        its own collections keep Python's count of new objects at 0: a program that
        makes optimizers and little else would never come to a full collection.
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
        """Warn, unless there was a warning with the same `about` (or message)."""
        if (about or message) not in self.warned:
            self.warned.add(about or message)
            warnings.warn(message, RuntimeWarning, stacklevel=3)


session = Session()


def reports() -> list[Report]:
    """The Reports of what was compiled in this process, oldest first.

    Of optimizers that were given to fuseopt.compile and are no more: the last 16.
    """
    return list(session.reports)
