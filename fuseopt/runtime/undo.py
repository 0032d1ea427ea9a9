"""Restore what a step has written, where an error ends it.

Launches of kernels of the CPU cannot fail, and are done in one C call. An ATen call may
raise any error, and so may a launch on a device. A signal may come between two of them.
So all tensors that are written before the last of these are copied first. If one of
them raises, the copies are written back in one C call, which no signal interrupts.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import torch

from ..ir.graph import Batch, Buffer, Extern, Graph, Run, Schedule, Step
from .tables.host_numbers import place_of

log = logging.getLogger("fuseopt")

#: Calls a partial of a function of C, as a function of C itself.
CALL = functools.partial.__call__


def at_once(calls: Iterable[Callable[[], object]]) -> list[object]:
    """Call partials of C functions, all in one C call."""
    return list(map(CALL, [*calls]))  # type: ignore[arg-type]


class Risk(NamedTuple):
    """Parts of a plan that an error may interrupt.

    All steps from index `steps` on are launches, of which only the first may raise.
    `written` are the buffers of the call's tensors that the earlier steps write, or
    that a raising step writes. `on_host` are those that kernels of the CPU write
    anywhere in the plan.
    """

    steps: int
    written: tuple[int, ...]
    on_host: tuple[int, ...] = ()


def risk_of(
    graph: Graph,
    schedule: Schedule,
    remote: Callable[[str], bool],
    made: Container[int] = (),
) -> Risk:
    """Return the Risk of a plan. `remote(device)` is false for the CPU alone. `made`:
    the payloads of calls that steps do not make.
    """
    buffers, steps = graph.buffers, schedule.steps
    risky = [
        i
        for i, step in enumerate(steps)
        if _may_raise(buffers, step, remote)
        and not (isinstance(step, Extern) and step.payload in made)
    ]
    if not risky:
        return Risk(0, ())
    # a step that fails may have written a part, unless it is a launch
    last = risky[-1]
    whole = last + isinstance(steps[last], (Extern, Batch))
    safe = [step for i, step in enumerate(steps) if i not in risky]
    return Risk(whole, *(_lasting(graph, x) for x in (steps[:whole], safe)))


def whole_risk(graph: Graph, schedule: Schedule) -> Risk:
    """Return the Risk of a plan that an error may interrupt anywhere."""
    return Risk(len(schedule.steps), _lasting(graph, schedule.steps))


def written_on(graph: Graph, schedule: Schedule, devices: Container[str]) -> list[int]:
    """Return the buffers of the call's tensors that some devices' kernels write."""
    kernels = [k for k in schedule.kernels if place_of(graph.buffers, k) in devices]
    return [*_lasting(graph, kernels)]


def _lasting(graph: Graph, steps: Sequence[Step]) -> tuple[int, ...]:
    """Return the buffers of the call's tensors that steps write."""
    written = {b: None for step in steps for b in _written(graph, step)}
    return tuple(b for b in written if graph.buffers[b].kind != "temp")


def _may_raise(
    buffers: Sequence[Buffer], step: Step, remote: Callable[[str], bool]
) -> bool:
    if isinstance(step, (Extern, Batch)):
        return True
    kernels = step.kernels if isinstance(step, Run) else (step,)
    return any(
        remote(buffers[column[0]].device)
        for kernel in kernels
        for v in kernel.every
        for column in v.columns
        if column
    )


def _written(graph: Graph, step: Step) -> Iterable[int]:
    if isinstance(step, (Extern, Batch)):
        yield from (graph.values[v] for v in step.writes)
        return
    for kernel in step.kernels if isinstance(step, Run) else (step,):
        for v in kernel.every:
            for slot, column in zip(v.slots, v.columns, strict=True):
                if slot.write:
                    yield from column


class Undo:
    """Context in which an error restores the contents of tensors.

    `done()` is called when all is written; an error after that restores nothing.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self.tensors = list(tensors)
        self.copies: list[torch.Tensor] = []
        self.written: list[bool] = []
        self.done = functools.partial(self.written.append, True)

    def __enter__(self) -> Undo:
        try:
            self.copies = [t.clone() for t in self.tensors]
        except (torch.OutOfMemoryError, MemoryError) as error:
            # the step itself may have memory enough
            log.warning("an error would leave this step half done: %s", error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.put_back()

    def put_back(self) -> bool:
        """Restore all tensors unless all is written. Return True if it did."""
        if self.written or len(self.copies) < len(self.tensors):
            return False
        if self.copies:
            torch._foreach_copy_(self.tensors, self.copies)
        return True


class UndoInC(Undo):
    """Undo for memory of the CPU: `saved(0)` saves it, `saved(1)` restores it."""

    def __init__(self, saved: Callable[[int], object]) -> None:
        super().__init__()
        self.saved = saved

    def __enter__(self) -> Undo:
        self.saved(0)
        return self

    def put_back(self) -> bool:
        """See Undo."""
        if self.written:
            return False
        self.saved(1)
        return True


__all__ = ["Risk", "Undo", "UndoInC", "at_once", "risk_of", "whole_risk", "written_on"]
