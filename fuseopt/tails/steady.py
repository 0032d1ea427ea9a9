"""What a call of a tail was asked for: is the next one asked for the same?

All is compared by identity, so that a call which changes nothing but gradients asks
for nothing anew: no number is checked twice, no list of parameters made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from .steps import steps_of

#: What of a tail may be set between calls, but for the decays.
SET = (
    "clip_grad_norm",
    "clip_grad_value",
    "clip_grad_adaptive",
    "norm_type",
    "error_if_nonfinite",
    "skip_nonfinite",
    "zero_grad",
    "stats",
    "grad_divisor",
    "scaler",
)
_SET = attrgetter(*SET)


class Steady:
    """The options of a call (see `asked_of`) and its `content` (see `TailInputs`).

    `strangers`: parameters of no optimizer, whose gradients are None.
    """

    def __init__(
        self,
        asked: list[Any],
        average: bool,
        content: Mapping[str, Any],
        params: Sequence[Any],
        strangers: Sequence[Any],
    ) -> None:
        self.average = average
        self.content = content
        self.params = params
        self.strangers = strangers
        self._asked = asked

    def holds(self, tail: Any, average: bool) -> bool:
        """Is the next call asked for the same, with nothing around its steps that this
        one did not have? Says nothing of what the optimizers hold.
        """
        now, known = asked_of(tail), self._asked
        if average is not self.average or len(now) != len(known):
            return False
        if not all(map(is_, now, known)) or not all(map(_alone, tail.optimizers)):
            return False
        if self.strangers and any(p.grad is not None for p in self.strangers):
            return False
        scale, scaler = self.content["scale"], tail.scaler
        if scale is None:
            return scaler is None or not scaler.is_enabled()
        return (
            scaler.is_enabled()
            and compat.scale_of(scaler) is scale
            and all(
                compat.stage_of(scaler, optimizer) is compat.STAGES.READY
                for optimizer in tail.optimizers
            )
        )


def asked_of(tail: Any) -> list[Any]:
    """What a tail is asked for, and whose steps it is to do."""
    asked = [*_SET(tail), *tail.decays]
    for optimizer in tail.optimizers:
        asked += (optimizer, *steps_of(optimizer))
    return asked


def may_last(content: Mapping[str, Any], asked: Iterable[Any]) -> bool:
    """Does a content say all that the next call is to be given, as long as it is asked
    for the same objects?
    """
    anew = content["models"] or content["objects"]
    if anew or any(found is not None for found in content["founds"]):
        return False
    return not any(
        _may_change(y) for x in asked for y in (x if isinstance(x, tuple) else (x,))
    )


def _may_change(option: Any) -> bool:
    """May the same object stand for another number, list or tensor in the next call?"""
    if isinstance(option, torch.Tensor):
        return (
            option.dim() > 0
        )  # `content` has a view, which other memory leaves behind
    if isinstance(option, Number):
        return False
    return isinstance(option, list) or hasattr(type(option), "__float__")


def _alone(optimizer: Optimizer) -> bool:
    """Is nothing to be called or told around a step?"""
    return compat.undisturbed(optimizer) and not optimizer.defaults.get(
        "differentiable"
    )
