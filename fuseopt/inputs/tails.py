"""Compare the options of a tail's call with those of the last call.

They are compared by identity. So a call that changes only gradients checks no number
again and makes no list of parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Number
from operator import attrgetter, is_
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..compat.facts import Fact, attributes, entry, items, result
from .attempts import Attempts
from .change import SAME, Change, Difference

#: Attributes of a tail that a user may set between calls, without the decays.
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
#: The attribute `grad` in C, and the classes whose tensors have no other.
_grad = attrgetter("grad")
PLAIN = (torch.Tensor, torch.nn.Parameter)
NEW_OPTIONS = Difference(Change.STRUCTURE, "an option of the tail has changed")
DISTURBED = Difference(Change.STRUCTURE, "there are hooks or modes around a step")
STRANGER = Difference(Change.STRUCTURE, "a parameter of no optimizer has a gradient")
RESCALED = Difference(Change.STRUCTURE, "the scaler is in another state")


class TailRecord:
    """Options of a call (see `options_of`) and its `tail_inputs` (see `TailInputs`).

    `strangers`: parameters without an optimizer, whose gradients are None.
    """

    def __init__(
        self,
        options: list[Any],
        average: bool,
        tail_inputs: Mapping[str, Any],
        params: Sequence[Any],
        strangers: Sequence[Any],
    ) -> None:
        self.average = average
        self.tail_inputs = tail_inputs
        self.params = params
        self.strangers = strangers
        self._options = options
        #: compares the record, and does the call, in one call of C: a SingleTail
        self.single: Any = None
        self.attempts = Attempts()

    def compare(self, tail: Any, average: bool) -> Difference:
        """Compare the options of the next call; return SAME or STRUCTURE.

        Looks for hooks and modes around the steps too. Does not compare the optimizers'
        tensors.
        """
        options, last_options = options_of(tail), self._options
        if average is not self.average or len(options) != len(last_options):
            return NEW_OPTIONS
        if not all(map(is_, options, last_options)):
            return NEW_OPTIONS
        if not all(map(_is_undisturbed, tail.optimizers)):
            return DISTURBED
        if self.strangers and any(p.grad is not None for p in self.strangers):
            return STRANGER
        return SAME if self.same_scale(tail) else RESCALED

    def same_scale(self, tail: Any) -> bool:
        """Is the scaler in the state of the last call?"""
        scale, scaler = self.tail_inputs["scale"], tail.scaler
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

    def facts(self, tail: Any) -> list[Fact] | None:
        """Return facts of which SAME follows, for optimizers of the same classes and a
        scaler of which `same_scale` is true. None if facts cannot show it.
        """
        facts = attributes(tail, *SET, "decays", "optimizers")
        facts += [*items(tail.decays), *items(tail.optimizers)]
        for optimizer in tail.optimizers:
            undisturbed, defaults = compat.undisturbed_facts(optimizer), "defaults"
            if undisturbed is None or optimizer.defaults.get("differentiable"):
                return None
            facts += [*undisturbed, *attributes(optimizer, "step", defaults)]
            facts.append(entry(optimizer.defaults, "differentiable"))
        if not all(type(p) in PLAIN for p in self.strangers):
            return None
        return facts + [result(None, _grad, p) for p in self.strangers]


def options_of(tail: Any) -> list[Any]:
    """Return the options of a tail, its optimizers, and their steps."""
    options = [*_SET(tail), *tail.decays]
    for optimizer in tail.optimizers:
        options += (optimizer, *steps_of(optimizer))
    return options


def steps_of(optimizer: Optimizer) -> tuple[Any, Any]:
    """Return the two objects that `optimizer.step` may come from.

    They are the optimizer's own attribute, or None, and that of its class. They change
    if a user replaces the step.
    """
    return vars(optimizer).get("step"), type(optimizer).step


def may_last(tail_inputs: Mapping[str, Any], options: Iterable[Any]) -> bool:
    """Can the next call use the same content while its options are the same objects?"""
    needs_update = tail_inputs["models"] or tail_inputs["objects"]
    if needs_update or any(found is not None for found in tail_inputs["founds"]):
        return False
    return not any(
        _may_change(y) for x in options for y in (x if isinstance(x, tuple) else (x,))
    )


def _may_change(option: Any) -> bool:
    """Can the same object be a different number, list or tensor in the next call?"""
    if isinstance(option, torch.Tensor):
        return (
            option.dim() > 0
        )  # `tail_inputs` has a view, which does not follow a new storage
    if isinstance(option, Number):
        return False
    return isinstance(option, list) or hasattr(type(option), "__float__")


def _is_undisturbed(optimizer: Optimizer) -> bool:
    """Is a step without hooks, modes and profilers, and not differentiable?"""
    return compat.undisturbed(optimizer) and not optimizer.defaults.get(
        "differentiable"
    )
