"""A plan: what of a compiled graph is the same for all tensors it is called with.

What comes in is a `Captured` graph, its `Schedule` and its kernels, which may still be
being built. `binding.bind` makes the tables for the layouts of a call's tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from ..capture.aten.dtypes import BUFFER_NAMES
from ..capture.host_results import host_results, read_at_once
from ..capture.results import Known, Leaf, Returned, leaves
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..ir.graph import Batch, Extern, Kernel, Run, Schedule
from .batches import PreparedBatch
from .cpp.table import TableFactory
from .extern_calls import prepare
from .guards.sharing import inputs
from .memory import layout
from .tables.addresses import positions
from .tables.host_numbers import CPU
from .undo import risk_of


class Built(NamedTuple):
    """What makes the tables of each kernel, by name, and the library of the guards,
    None where there is no compiler. `raw_fields`: may it read the memory of tensors?
    """

    factories: Mapping[str, TableFactory]
    helper: ctypes.PyDLL | None = None
    raw_fields: bool = True


class Kernels(Protocol):
    """Kernels that may still be being built."""

    def ready(self) -> AbstractContextManager[Built]:
        """Wait for all of them; what is done within is the binding of a plan."""


class Plan:
    """A captured graph, its schedule and kernels, and what follows from these alone.

    `positions`: where each buffer has its address. `inputs`: what is done to the
    tensors of a call. `memory`: who makes which memory. `externs`: the calls of ATen,
    by payload; `batches`: the batched ones, by the payload of their first row, which
    `allowed` says may be made (see PreparedBatch). `simple`: it is one kernel that
    makes no memory. `lean`: a call needs its tensors' addresses alone, and those that
    numbers are in. `at_once`: what it gives is looked at as soon as it has run, but for
    `host_results`: numbers of the host, by the buffer that the step fills with one.
    `risk`: how far an error may come.
    """

    def __init__(
        self,
        captured: Captured,
        schedule: Schedule,
        kernels: Kernels,
        allowed: Callable[[Batch], bool | None] | None = None,
    ) -> None:
        self.captured = captured
        self.schedule = schedule
        self.kernels = kernels
        graph = captured.graph
        buffers = graph.buffers
        statics, steps = len(captured.statics), schedule.steps
        self.positions = positions(buffers, statics + len(captured.tensor_args))
        self.inputs = inputs(graph, statics, captured.twins, captured.dropped)
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
        self.batches = {
            batch.externs[0].payload: PreparedBatch(
                batch, buffers, allowed, schedule.memory, schedule.stacks
            )
            for batch in schedule.batches
        }
        self.risk = risk_of(graph, schedule, lambda device: device != CPU)
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
        #: are tensors of a call needed but to look at them, and to undo what an error
        #: interrupts?
        self.lean = (
            all(isinstance(step, (Kernel, Run)) for step in steps)
            and no_tensors
            and not captured.complexes
        )
        read = read_at_once(captured, self.host_results)
        self.at_once = bool(captured.given) or read

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Are the tensors of a call of the dtypes and shapes that it was captured for?

        What Dynamo shows a backend is no promise: a number that it shows in a tensor of
        float32 comes in one of float64.
        """
        return all(
            BUFFER_NAMES.get(t.dtype) == b.dtype and t.shape == b.shape
            for b in self.captured.graph.buffers
            if b.kind in ("static", "arg")
            for t in (tensors[b.source],)
        )


def _is_number(leaf: Leaf, host_results: Container[int]) -> bool:
    """Is a result a number of the host, or one that is the same in each call?"""
    if isinstance(leaf, Known):
        return not isinstance(leaf.value, torch.Tensor)
    if isinstance(leaf, Returned):
        return leaf.buffer in host_results
    return isinstance(leaf, Sym)
