"""A clip by the total norm that is left to the next compiled step: `defer="unsafe"`.

`fuseopt.clip_grad_norm_` takes the norm in one launch, and the kernel of the step
scales the gradients that it reads anyway. Until that step, and after it, their memory
holds what backward wrote, so that whoever reads it sees gradients that are not clipped:
a user has to ask for that. A gradient that was written between clip and step raises,
and one that was replaced is as it is in eager. Where the step cannot scale gradients
itself, they are scaled in memory before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from .. import compat
from ..compiler.report import Report
from ..compiler.session import COMPILED, session
from ..config import resolve
from ..errors import CaptureError
from ..isolate.isolated import TRACES, Isolated
from .arguments import gradients_of, parameters_of
from .in_one import InOne
from .steps import has_state

Tensors = list[torch.Tensor]
WRITTEN = (
    'gradients were written between fuseopt.clip_grad_norm_(defer="unsafe") and {}, so '
    "that nobody knows what of them is still to be clipped; leave `defer` out, or set "
    "gradients to None where a step is skipped"
)


class DeferredClip:
    """The clips of one optimizer's gradients that are left to its compiled step.

    A call of `leave` says that gradients are to be scaled; the next `step` or `settle`
    does it.
    """

    def __init__(self, isolated: Isolated, optimizer: Optimizer) -> None:
        options = isolated.options
        self._config = resolve(None, options)
        self.in_one = InOne([optimizer], [isolated.function], self._config, options)
        # has the optimizer stepped before, so that its state is there?
        self._begun = False
        self._content: dict[str, Any] = {}
        self._factor: torch.Tensor | None = None
        self._foreach: bool | None = None
        self._version_of: dict[torch.Tensor, int] = {}

    def leave(self, factor: torch.Tensor, grads: Tensors, foreach: bool | None) -> None:
        """Leave it to the next step to multiply `grads` by `factor`, a tensor without
        dimensions, as torch does with this `foreach`.
        """
        self._factor, self._foreach = factor, foreach
        self._version_of = {g: g._version for g in grads}
        session.deferring.add(self)

    def settle(self, grads: Tensors) -> None:
        """Scale in memory what is still to be scaled of `grads`."""
        waiting = self._waiting(grads, "the next clip")
        self._scale(waiting)
        for g in waiting:
            del self._version_of[g]

    def step(self, isolated: Isolated, alone: bool) -> bool:
        """Scale gradients and step; False if they were scaled at most, in memory.
        `alone`: has the call of the step no arguments?

        Raises RuntimeError, before anything is written, if a gradient was written since
        it was to be scaled.
        """
        if not self._version_of:  # as of most steps: do not wait for the lock
            return False
        optimizer = isolated.owner()
        assert optimizer is not None
        with isolated.lock:
            if self._factor is None:  # another thread was first
                return False
            params = parameters_of([optimizer])
            grads = gradients_of(params)
            waiting = self._waiting(grads, "the step")
            if alone and waiting and len(waiting) == len(grads):
                if self._in_its_kernel(optimizer, params, grads):
                    self._forget()
                    return True
            self._scale(waiting)
            self._forget()
            return False

    def _waiting(self, grads: Tensors, until: str) -> Tensors:
        """Those of `grads` that are still to be scaled. `until`: the call that asks."""
        waiting = [g for g in grads if g in self._version_of]
        if any(g._version != self._version_of[g] for g in waiting):
            raise RuntimeError(WRITTEN.format(until))
        return waiting

    def _scale(self, grads: Tensors) -> None:
        """Scale gradients in memory, as torch's function does."""
        if not grads:
            return
        assert self._factor is not None
        with torch.no_grad():
            if self._foreach is False:
                for g in grads:
                    g.mul_(self._factor)
            else:
                torch._foreach_mul_(grads, self._factor)

    def _forget(self) -> None:
        session.deferring.discard(self)
        self._factor, self._version_of = None, {}

    def _in_its_kernel(
        self, optimizer: Optimizer, params: Tensors, grads: Tensors
    ) -> bool:
        """Step with a kernel that scales gradients; False if nothing was done."""
        one = self.in_one
        if compat.stance() not in TRACES or not compat.without_modes():
            return False
        begun, self._begun = self._begun or has_state(optimizer), True
        if not begun or one.why or optimizer.defaults.get("differentiable"):
            return False
        factor = self._factor
        with torch.no_grad():
            if one.repeats and self._content["factor"] is factor:
                if one.again() is not None:
                    return True
            content = self._content = content_of(factor)
            result = one.step(content, True, params, grads)
        if isinstance(result, str):
            said = f"The step of {type(optimizer).__name__} cannot clip: {result}"
            if self._config.fallback == "error":
                raise CaptureError(
                    f"{said} (options={{'fallback': 'error'}} was given)"
                )
            report_once(f"{said}; gradients are scaled in memory before it")
        return isinstance(result, tuple)


def content_of(factor: torch.Tensor | None) -> dict[str, Any]:
    """The content of a tail that scales gradients and steps; see `TailInputs`."""
    numbers = ("divisor", "scale", "max_norm", "max_value", "adaptive")
    lists = ("places", "averages", "decays", "models", "objects", "copies")
    flags = ("judged", "zeroed", "measured")
    return {
        **dict.fromkeys(numbers),
        **{name: [] for name in lists},
        **dict.fromkeys(flags, False),
        "founds": [None],
        "norm_type": 2.0,
        "factor": factor,
    }


class Owner(NamedTuple):
    """A compiled step, and those parameters of its optimizer that are clipped."""

    isolated: Isolated
    params: Tensors


def owners_of(params: Sequence[torch.Tensor]) -> tuple[list[Owner], str]:
    """The compiled steps of the optimizers that have `params`, and why a clip cannot be
    left to them, "" if it can.
    """
    every = {*map(id, params)}
    places = {*every}
    owners: list[Owner] = []
    for optimizer in [*session.compiled]:
        clipped = [p for p in parameters_of([optimizer]) if id(p) in every]
        if not clipped:
            continue
        name = type(optimizer).__name__
        isolated: Any = getattr(optimizer.step, COMPILED, None)
        if not isinstance(isolated, Isolated) or isolated.owner() != optimizer:
            return [], f"{name}.step is not the one that fuseopt.compile made"
        if not compat.unhooked(optimizer):
            return [], f"hooks of {name} may read gradients"
        if optimizer in session.tails:
            return [], f"{name} has a tail, which clips by itself"
        if not places.issuperset(map(id, clipped)):
            return [], "a parameter is in two optimizers"
        places.difference_update(map(id, clipped))
        owners.append(Owner(isolated, clipped))
    if places:
        return [], "a parameter is in no optimizer that fuseopt.compile was given"
    return owners, ""


def report_once(text: str) -> None:
    """Have a Report of what runs otherwise, unless there is one that says the same."""
    if all(report.fallback != text for report in session.reports):
        session.reports.append(Report(fallback=text))


def deferred_of(isolated: Isolated) -> DeferredClip:
    """The deferred clip of a compiled step, made if there is none."""
    clip = isolated.deferred
    if not isinstance(clip, DeferredClip):
        optimizer = isolated.owner()
        assert optimizer is not None
        clip = isolated.deferred = DeferredClip(isolated, optimizer)
    return clip
