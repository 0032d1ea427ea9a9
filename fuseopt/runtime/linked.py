"""A step whose first tensors another one has compared -> its launches, without a look.

Two steps of one call may read the same tensors: what finds the norm of all gradients,
and what steps with it. The guard of one has asked what became of each; then the other
takes over the addresses, and looks only at what it has besides.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

from ..ir.expressions import Item
from .binding import Binding
from .commit import Launches
from .guards.tensors import TensorGuard
from .step import CompiledStep


class Linked:
    """A bound step, and another's guard that compares its first tensors as well.

    Made by `linked`, in a call in which both have looked at the same tensors. `look`:
    see TensorGuard.following. `rest`: the last tensors of the step.
    """

    def __init__(
        self,
        bound: Binding,
        other: TensorGuard,
        look: Callable[[list[torch.Tensor]], int],
        rest: list[torch.Tensor],
    ) -> None:
        self.bound = bound
        self.guard = bound.guard
        self.other = other
        self.look = look
        self.rest = rest

    def launches(
        self, step: CompiledStep, after: CompiledStep, fresh: list[torch.Tensor]
    ) -> tuple[Launches, Any] | None:
        """What runs `step`, whose first tensors `after` has just compared, and what is
        to live until it has run. None, if it is to look for itself.

        `fresh`: some of the step's own, which are others in each call. The numbers that
        it is given are as they were.
        """
        bound, theirs = self.bound, after.program.bound
        if step.program.bound is not bound or bound.guard is not self.guard:
            return None
        if theirs is None or theirs.guard is not self.other:
            return None
        if not self.other.comparable or self.look([*fresh, *self.rest]):
            return None
        held = bound.temps.take(bound.addresses)
        return bound.launches(torch.get_num_threads()), held


def linked(
    step: CompiledStep,
    other: TensorGuard,
    places: array[int],
    own: tuple[int, int],
    rest: list[torch.Tensor],
) -> Linked | None:
    """A link between both, where there can be one: the step runs on the CPU, makes no
    memory in a call, and reads no numbers of tensors. It has first the tensors that are
    at `places` of the guard, then some of its own, of which the last ones are fresh in
    each call, `own[1]` from `own[0]` on, then the rest.
    """
    bound = step.program.bound
    if bound is None or bound.guard is None or not bound.settled:
        return None
    reads = any(isinstance(x, Item) for x in bound.plan.captured.graph.numbers)
    if reads or not bound.on_cpu or bound.allocated or bound.infers:
        return None
    if bound.guard.n != sum(own) + len(rest) or len(places) > own[0]:
        return None
    look = bound.guard.following(other, places, own, sum(own))
    return None if look is None else Linked(bound, other, look, rest)
