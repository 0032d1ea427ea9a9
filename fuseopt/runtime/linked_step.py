"""Launch a step whose first tensors another step has compared already.

Two steps of one call may read the same tensors: one computes the norm of all gradients,
the second one uses it. The guard of the first compares them. The second takes over
their addresses and compares only its other tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import torch

from ..ir.expressions import Item
from .binding import Binding
from .commit import Launches
from .devices import Place
from .guards.tensors import TensorGuard
from .step import CompiledStep


class LinkedStep:
    """Bound step, and the guard of another step that compares its first tensors.

    `link` makes it, in a call in which both compared the same tensors. `compare`: see
    TensorGuard.following. `rest` has the last tensors of the step.
    """

    def __init__(
        self,
        bound: Binding,
        other: TensorGuard,
        compare: Callable[[list[torch.Tensor]], int],
        rest: list[torch.Tensor],
    ) -> None:
        assert bound.guard is not None
        self.bound, self.guard = bound, bound.guard
        self.other = other
        self.compare = compare
        self.rest = rest

    def launches(
        self, step: CompiledStep, after: CompiledStep, fresh: list[torch.Tensor]
    ) -> tuple[Launches, Any] | None:
        """Return the launches of `step`, whose first tensors `after` has just compared,
        and memory to keep until they have run. Return None if the step must compare by
        itself.

        `fresh` has those tensors of `step` that are new in each call. The numbers among
        its arguments must not have changed.
        """
        bound, theirs = self.bound, after.program.bound
        if step.program.bound is not bound or bound.guard is not self.guard:
            return None
        if theirs is None or theirs.guard is not self.other:
            return None
        if not self.other.comparable:
            return None
        if not self.guard.follow(self.compare([*fresh, *self.rest])):
            return None
        if not bound.on_cpu:
            # a capture of the user's joins launches with their tensors
            if any(map(Place.capturing, bound.tables.places)):
                return None
            return step.launch_alone(bound), None
        arena = bound.temps.take(bound.addresses)
        return bound.launches(torch.get_num_threads()), arena


def link(
    step: CompiledStep,
    other: TensorGuard,
    places: array[int],
    unshared: tuple[int, int],
    rest: list[torch.Tensor],
) -> LinkedStep | None:
    """Return a link of a step to another step's guard, or None. The step must have
    kernels only, allocate nothing in a call, and read no numbers of tensors.

    Its first tensors are those at the indices `places` of the guard. Other tensors
    follow, of which `unshared[1]` from index `unshared[0]` on are new in each call.
    `rest` are the last ones.
    """
    bound = step.program.bound
    if bound is None or bound.guard is None or not bound.settled:
        return None
    reads = any(isinstance(x, Item) for x in bound.plan.captured.graph.numbers)
    if reads or bound.infers:
        return None
    on_devices = bound.device_launches
    if bound.allocated if bound.on_cpu else not (on_devices and on_devices.alone):
        return None
    if bound.guard.n != sum(unshared) + len(rest) or len(places) > unshared[0]:
        return None
    compare = bound.guard.following(other, places, unshared, sum(unshared))
    return None if compare is None else LinkedStep(bound, other, compare, rest)
