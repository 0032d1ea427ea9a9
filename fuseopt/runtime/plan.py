"""A plan: what of a compiled graph is the same for all tensors it is called with.

What comes in is a `Captured` graph, its `Schedule` and its kernels, which may still be
being built. `binding.bind` makes the tables for the layouts of a call's tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from ..capture.trace import Captured, read_at_once
from ..ir.graph import Extern, Kernel, Schedule
from .cpp.table import TableFactory
from .extern_calls import prepare
from .guards.sharing import inputs
from .memory import layout
from .tables.addresses import positions


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
    by payload. `simple`: it is one kernel that makes no memory. `lean`: a call needs
    its tensors' addresses alone, and those that numbers are in. `at_once`: what it
    gives is looked at as soon as it has run.
    """

    def __init__(
        self, captured: Captured, schedule: Schedule, kernels: Kernels
    ) -> None:
        self.captured = captured
        self.schedule = schedule
        self.kernels = kernels
        graph = captured.graph
        buffers = graph.buffers
        statics, steps = len(captured.statics), schedule.steps
        self.positions = positions(buffers, statics + len(captured.tensor_args))
        self.inputs = inputs(graph, statics, captured.twins, captured.dropped)
        self.memory = layout(buffers, schedule.memory)
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
        self.simple = (
            len(steps) == 1
            and isinstance(steps[0], Kernel)
            and not schedule.temps
            and not any(buffers[b].kind == "view" for b in graph.outputs)
        )
        nothing = captured.result == () and not captured.given
        self.lean = self.simple and nothing and not captured.complexes
        self.at_once = bool(captured.given) or read_at_once(captured)
