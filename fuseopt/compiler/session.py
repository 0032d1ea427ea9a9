"""State of this process: reports, kernels, captured graphs, given warnings."""

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

#: The number of Reports kept for optimizers that no longer exist.
RETIRED = 16
#: The number of dropped optimizers after which the garbage collector runs.
UNCOLLECTED = 16
#: The attribute that marks a step which fuseopt.compile made.
COMPILED = "_fuseopt"


class Session:
    """State of this process: reports, kernels, captured graphs, given warnings."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.probes = Probes()
        self.vectors = Vectors()
        self.reports: list[Report] = []
        self.retired: list[Report] = []  # of optimizers that no longer exist
        self.uncollected = 0  # optimizers dropped since the last collection
        self.warned: set[str] = set()
        self.mishaps: list[str] = []  # errors of fuseopt's own
        #: optimizers whose `step` the user passed to torch.compile for fuseopt
        self.bound: weakref.WeakSet[Any] = weakref.WeakSet()
        #: shadows of optimizers whose steps are compiled separately
        self.isolated: weakref.WeakSet[Any] = weakref.WeakSet()
        #: those among them whose tensors have no memory, each with a function that
        #: allocates memory while Dynamo traces
        self.hollow: weakref.WeakKeyDictionary[Any, Callable[[], Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: the reported reason why an optimizer's step runs in eager
        self.eager: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        #: optimizers that the user passed to fuseopt.compile, by id
        self.compiled: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )
        #: the clips deferred to steps; None where there are none
        self.deferred: Any = None
        #: optimizers that step during the backward
        self.in_backward: weakref.WeakSet[Any] = weakref.WeakSet()
        #: a weak reference to the tail of an optimizer
        self.tails: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = (
            weakref.WeakKeyDictionary()
        )
        #: clips of gradients, by the id of the first parameter that has a gradient
        self.clips: dict[int, Any] = {}
        #: fakes of the traces of bound steps
        self.traces: weakref.WeakSet[Any] = weakref.WeakSet()
        #: optimizers with a graph break in their steps
        self.cut: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.cached_property
    def triton_builder(self) -> Any:
        """Builder of Triton kernels, made on first use; a CPU never imports Triton."""
        from ..runtime.triton.build import TritonBuilder

        return TritonBuilder()

    @functools.cached_property
    def graphs(self) -> Any:
        """CUDA graphs, made on first use.

        They are released before the libraries that they call.
        """
        from ..runtime.sites import Graphs

        graphs = Graphs()
        atexit.register(graphs.release)
        return graphs

    def retire(self, reports: list[Report]) -> None:
        """Add Reports of an optimizer that no longer exists; keep the last RETIRED
        ones.
        """
        self.retired += [report for report in reports if report in self.reports]
        dropped = set(map(id, self.retired[:-RETIRED]))
        if dropped:
            del self.retired[:-RETIRED]
            self.reports[:] = [x for x in self.reports if id(x) not in dropped]

    def collect(self) -> None:
        """Run the garbage collector after UNCOLLECTED dropped optimizers.

        torch's graphs are cycles. Dynamo turns the collector off while it traces, and
        its own collections keep Python's count of new objects at 0. So a program that
        mainly makes optimizers would never reach a full collection.
        """
        if self.uncollected >= UNCOLLECTED and gc.isenabled():
            self.uncollected = 0
            gc.collect()

    def allocate(self, optimizer: Any) -> None:
        """Allocate the memory of a hollow optimizer's tensors."""
        fill = self.hollow.get(optimizer)
        if fill is not None:
            fill()

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
    """Return the Reports of this process, oldest first.

    For optimizers that were passed to fuseopt.compile and no longer exist, the last 16
    Reports are kept.
    """
    return list(session.reports)
