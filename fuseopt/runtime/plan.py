"""Plan of a compiled graph: its common part for all tensors that it is called with.

A plan is made from a `Captured` graph, its `Schedule` and its kernels, which may still
be being built. `binding.bind` makes the tables for the layouts of a call's tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from ..capture.aten.dtypes import BUFFER_NAMES
from ..capture.host_results import host_results, read_at_once
from ..capture.results import ConstantResult, Leaf, Returned, leaves
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..ir.graph import Batch, Extern, Kernel, Run, Schedule, Symbol
from ..ir.products import CHAINED
from .batches import PreparedBatch
from .chained_batches import ChainedBatches, chained_batches
from .chains import Chains
from .constants import constants
from .cpp.table import TableFactory
from .extern_calls import prepare, touched_inputs
from .gathers import Scratch
from .guards.sharing import inputs
from .memory import layout
from .series import Series, series_of
from .tables.addresses import positions
from .tables.host_numbers import CPU
from .undo import risk_of

#: One of so many tensors is few.
FEW = 8


class Built(NamedTuple):
    """Makers of each kernel's tables, by name, and the library of the guards, None
    where there is no compiler. `raw_fields` is true if the library may read the memory
    of tensors.
    """

    factories: Mapping[str, TableFactory]
    helper: ctypes.PyDLL | None = None
    raw_fields: bool = True


class Kernels(Protocol):
    """Interface of kernels that may still be being built."""

    def ready(self) -> AbstractContextManager[Built]:
        """Wait for all of them; the context contains the binding of a plan."""


class Plan:
    """Captured graph, its schedule and kernels, and what follows from these alone.

    `positions` has where the address of each buffer is, `inputs` the effects on the
    tensors of a call, `memory` the makers of memory. `externs` has the calls of ATen,
    by payload. `batches` has the batched ones, by the payload of their first row;
    `allowed` admits them (see PreparedBatch). `simple` is true for one kernel that
    makes no memory. `lean` is true if a call needs only the addresses of its tensors,
    and those with numbers. `reads_few` is true if its calls of ATen touch few of them.
    `at_once` is true if the caller reads results as soon as the
    step has run. `host_results`, numbers of the host by the buffer that the step fills
    with one, do not count for that. `risk` is how far an error may come.
    """

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        kernels: Kernels,
        allowed: Callable[[Batch], bool | None] | None = None,
        chains: Chains | None = None,
    ) -> None:
        self.captured = captured
        self.schedule = schedule
        self.kernels = kernels
        graph = captured.graph
        buffers = graph.buffers
        statics, steps = len(captured.statics), schedule.steps
        self.positions = positions(buffers, statics + len(captured.tensor_args))
        moved = [x.place for x in captured.given if x.written]
        self.inputs = inputs(graph, statics, captured.twins, captured.dropped, moved)
        self.memory = layout(buffers, schedule)
        freed = schedule.memory.freed or ((),) * len(steps)
        self.externs = {
            step.payload: prepare(
                step,
                captured.calls[step.payload],
                buffers,
                self.memory.members,
                schedule.memory,
                self.positions.of,
                last,
            )
            for step, last in zip(steps, freed, strict=True)
            if isinstance(step, Extern)
        }
        scratch = Scratch()
        self.batches = {
            batch.externs[0].payload: PreparedBatch(
                batch,
                buffers,
                allowed,
                schedule.memory,
                schedule.stacks,
                scratch,
                captured.calls[batch.externs[0].payload].autocast,
                chains,
            )
            for batch in schedule.batches
        }
        rows = chained_batches(
            graph, steps, self.batches, schedule.memory, schedule.stacks, chains
        )
        #: what C calls one after another, by the index of the first step
        self.series: dict[int, Series | ChainedBatches] = {
            **series_of(steps, self.externs),
            **rows,
        }
        on_cpu = {b.device for b in buffers} == {CPU}
        #: calls whose results stay, by payload; none on a device
        self.constants = constants(captured, schedule) if on_cpu else {}
        #: true if all other steps are kernels on the CPU and chains
        self.in_c = bool(rows) and all(
            isinstance(step, (Kernel, Run))
            or (isinstance(step, Extern) and step.payload in self.constants)
            or (isinstance(step, Batch) and step.way == CHAINED)
            for step in steps
        )
        self.in_c &= on_cpu
        scales = [s for b in schedule.batches if b.way == CHAINED for s in b.scales]
        #: the numbers that chains read
        self.scales = sorted({s.expr for s in scales if isinstance(s, Symbol)})
        self.risk = risk_of(
            graph, schedule, lambda device: device != CPU, self.constants
        )
        self.simple = (
            len(steps) == 1
            and isinstance(steps[0], Kernel)
            and not schedule.temps
            and not any(buffers[b].kind == "view" for b in graph.outputs)
        )
        self.host_results = host_results(captured)
        no_tensors = not captured.given and all(
            _is_number(leaf, self.host_results) for leaf in leaves(captured.result)
        )
        #: true if a call needs its tensors only to compare them, and to undo what an
        #: error interrupts
        self.lean = (
            all(isinstance(step, (Kernel, Run)) for step in steps)
            and no_tensors
            and not captured.complexes
        )
        needed = len(touched_inputs(graph, schedule)) + len(captured.given)
        n = statics + len(captured.tensor_args)
        #: true if a call reads few of its tensors: each is found when it is read
        self.reads_few = FEW * needed <= n and not captured.complexes
        read = read_at_once(captured, self.host_results)
        self.at_once = bool(captured.given) or read

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Have the tensors of a call the dtypes and shapes of the capture?

        Dynamo's example inputs are no promise: a number may appear as a tensor of
        float32 and arrive as one of float64.
        """
        return all(
            BUFFER_NAMES.get(t.dtype) == b.dtype and t.shape == b.shape
            for b in self.captured.graph.buffers
            if b.kind in ("static", "arg")
            for t in (tensors[b.source],)
        )


def _is_number(leaf: Leaf, host_results: Container[int]) -> bool:
    """Is a result a number of the host, or one that is the same in each call?"""
    if isinstance(leaf, ConstantResult):
        return not isinstance(leaf.value, torch.Tensor)
    if isinstance(leaf, Returned):
        return leaf.buffer in host_results
    return isinstance(leaf, Sym)
