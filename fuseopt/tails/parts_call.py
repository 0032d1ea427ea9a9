"""One call of a tail of DTensors, which later calls may repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..compat.facts import attributes
from ..inputs.pending_gradients import GradientsInC
from ..replicate.driver import LedOptimizer
from ..replicate.single_call import SingleCall, single_call
from ..replicate.tail_arguments import TailArguments
from ..shards.local import LocalOptimizer
from .part_norm import PartNorm

Tensors = list[torch.Tensor]


@dataclass
class PartsCall:
    """Leader, arguments and norm of a call, for others with the same options.

    `total`: gets the norm. `written`: DTensors beside the parameters that it writes.
    `specs`: see `LocalOptimizer.grad_specs`.
    """

    leader: LedOptimizer
    arguments: TailArguments
    norm: PartNorm | None
    total: torch.Tensor
    tail_inputs: Mapping[str, Any]
    written: Tensors
    writes_gradients: bool
    specs: list[Any]
    #: repeats the last step in one call of C, with the parts in the list of the second
    single: tuple[SingleCall, GradientsInC] | None = None

    def step(self, local: LocalOptimizer, make: Callable[..., Any]) -> bool:
        """Do the step on the parts that `local.given` has; False if nothing was done.

        `make` compiles the step's function.
        """
        arguments = local.stand_in, make, local.given, self.arguments
        done = self.leader.step(*arguments)
        if done:
            local.settle()
        return done

    def again(
        self, local: LocalOptimizer, parts: Tensors, make: Callable[..., Any]
    ) -> bool:
        """Do the step of a call like the last one; see `step`."""
        if self.single is not None and self._launched(local, parts, *self.single):
            return True
        self.single, local.given.grads = None, parts
        done = self.step(local, make)
        if done:
            local.given.drop()
            self._learn(local)
        return done

    def _launched(
        self,
        local: LocalOptimizer,
        parts: Tensors,
        single: SingleCall,
        source: GradientsInC,
    ) -> bool:
        """Do the step in one call of C, if it repeats the last one."""
        if local.given.in_c is not source:
            return False
        try:
            source.grads[:] = parts
            return single.launched()
        finally:
            single.compared.forget()

    def _learn(self, local: LocalOptimizer) -> None:
        """Make the single call that repeats the last one, if its step was steady."""
        leader, source = self.leader, local.given.in_c
        steady = next(reversed(leader.steady.calls.values()), None)
        if steady is None or steady.in_c is None or source is None:
            return
        if steady.in_c.given is not source or not steady.attempts.due():
            return
        facts = [*attributes(leader, "refusal", "steady"), *local.given.facts()]
        around = None, None, facts, self.arguments
        single = single_call(steady, local.stand_in, *around, reads=False)
        if single is not None and single.launches:
            self.single = single, source
