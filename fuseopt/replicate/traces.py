"""Traces of some of an optimizer's models, and the choice of one for a call."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..compiler.session import session
from ..inputs.keys import LanesDiffer
from ..inputs.lanes import Lanes
from ..inputs.state_guard import Epoch
from ..shadow.optimizer import Shadow
from .models import Models
from .step import LedStep

#: The largest number of traces of a step, each for different kinds of lanes.
TRACES = 12


class Trace:
    """Dynamo's trace of some models: `active`, by number."""

    def __init__(self, models: Models, active: tuple[int, ...]) -> None:
        self.active = active
        #: the active models that have lanes
        self.kinds = [k for k in active if k in models.of.values()]
        self.fill = models.fill
        self.lists = models.lists(active)
        self.state: Any = models.states(active)
        self.shadow: Shadow | None = None
        #: names that had a numpy.float64 when the step was compiled
        self.numpy_names: frozenset[str] = frozenset()
        self.compiled: Callable[..., Any] | None = None
        self.steps: list[LedStep] = []
        #: the lanes of its last call
        self.lanes: Lanes | None = None
        #: sets of fewer models for which it is not valid
        self.refused: set[tuple[int, ...]] = set()

    @property
    def stand_in(self) -> Any:
        """The argument of the step."""
        assert self.shadow is not None
        return self.shadow.stand_in

    def refreshed(self, optimizer: Optimizer, epoch: Epoch | None = None) -> Shadow:
        """Return the optimizer's shadow with models as lanes; `epoch`: see Shadow."""
        if self.shadow is None:
            if type(optimizer.state) not in (dict, collections.defaultdict):
                raise LanesDiffer(f"its state is a {type(optimizer.state).__name__}")
            self.shadow = Shadow(optimizer, follows=True)
            session.hollow[self.shadow.stand_in] = self.fill
            state = optimizer.state.copy()
            state.clear()
            state.update(self.state)
            self.state = state
        if self.shadow.helper is None and self.steps:
            self.shadow.helper = self.steps[-1].helper
        self.shadow.refresh(optimizer, self.state, self.lists, epoch)
        if self.shadow.numpy_names != self.numpy_names:
            self.numpy_names, self.compiled = self.shadow.numpy_names, None
            self.steps.clear()
        return self.shadow

    def check_worth(self, lanes: Lanes) -> None:
        """Raise LanesDiffer if more models would be traced than there are lanes."""
        n, all_lanes = len(self.active), len(lanes.params)
        if n > all_lanes:
            raise LanesDiffer(f"{n} models were to be traced for {all_lanes} lanes")

    def release(self) -> None:
        """Release all of the optimizer, except Dynamo's compiled code."""
        self.lanes = None
        if self.shadow is not None:
            self.shadow.forget()
        for step in self.steps:
            step.drop(reported=step.reported)

    def drop(self) -> None:
        """Drop the programs of all graphs, which are for lanes that have changed."""
        for step in self.steps:
            step.drop()

    def forget(self) -> None:
        """Compare nothing with the last call, which was interrupted."""
        for step in self.steps:
            step.forget()

    def made(self) -> dict[int, dict[int, torch.Tensor]]:
        """Return the tensors that the last call created, by token and by lane."""
        made: dict[int, dict[int, torch.Tensor]] = {}
        for step in self.steps:
            made.update(step.take())
        return made

    def check_counters(self, models: Models, optimizer: Optimizer) -> None:
        """Raise LanesDiffer if the trace holds only for the models' counter values.

        The caller must have taken over the step's writes to the shadow.
        """
        if self.shadow is not None:
            self.shadow.clean = False
        shadow = self.refreshed(optimizer)
        fitting: Any = getattr(self.compiled, "fitting", lambda _: [])
        before = fitting(shadow.stand_in)
        for number, key in models.counted.values():
            if number in self.active:
                shadow.stand_in.state[models.params[number]][key] += 1000
        shadow.clean = False
        if not before or fitting(shadow.stand_in) != before:
            raise LanesDiffer("the trace is valid for one count of steps only")


def present(lanes: Lanes) -> tuple[int, ...]:
    """Return the models of the kinds of these lanes."""
    return tuple(sorted({kind.model for kind in lanes.kinds}))


def choose(traces: list[Trace], models: Models, lanes: Lanes) -> Trace:
    """Return a trace that includes the models of the kinds present.

    Prefers the trace that ran the last lanes of this home, then the smallest. If there
    is none, adds a new one to `traces`. Raises LanesDiffer.
    """
    home = lanes.home
    last = None if home is None else home.led_by()
    trace = _choose(traces, models, present(lanes), last)
    if home is not None:
        home.led_by = weakref.ref(trace)
    return trace


def _choose(
    traces: list[Trace],
    models: Models,
    present: tuple[int, ...],
    last: Trace | None,
) -> Trace:
    fit = [
        trace
        for trace in traces
        if present not in trace.refused and set(present) <= set(trace.active)
    ]
    if last is not None and last in fit:
        return last
    if fit:
        return min(fit, key=lambda trace: len(trace.active))
    if len(traces) >= TRACES:
        raise LanesDiffer("its lanes change too often")
    wanted = set(present)
    if any(models.params[k].grad is None for k in present):
        # each of them may lose its gradient later
        wanted |= models.without_gradients(present)
    for trace in traces:
        with_gradients = {k for k in trace.active if models.params[k].grad is not None}
        if with_gradients & wanted:
            wanted |= set(trace.kinds)
    for active in (models.active(sorted(wanted)), models.active(present)):
        if not any(trace.active == active for trace in traces):
            new_trace = Trace(models, active)
            traces.append(new_trace)
            return new_trace
    raise LanesDiffer("the effect of the step on a lane depends on other lanes")
