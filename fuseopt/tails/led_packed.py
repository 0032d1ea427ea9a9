"""Tail of one optimizer whose state is packed: the step's kernel unpacks and packs too.

It has the launches of the plain tail. See `storage/step.py` for packed state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ..config import Config
from ..isolate.isolated import OptimizerCompiler
from ..replicate.driver import LedOptimizer
from ..replicate.tail_arguments import TailArguments
from ..storage.packing import LanePacking
from .led import LedTail, TailPlan
from .totals import NormLaunch


class LedPacked(LedTail):
    """Tail of one optimizer with packed state; `packs` steps it outside of the tail."""

    led_at_any_size = True  # as the step itself
    only_leads = False

    def __init__(
        self,
        optimizer: Optimizer,
        function: Callable[..., Any],
        config: Config,
        options: Mapping[str, Any],
        packs: OptimizerCompiler,
    ) -> None:
        super().__init__(optimizer, function, config, options)
        self.packs = packs

    def begins(self) -> bool:
        """Must a step run in eager, since it makes state or has no gradient?"""
        packed_step = self.packs.packed_step
        return packed_step is not None and packed_step.begins(self.optimizer)

    def _leader_of(self, form: TailPlan) -> LedOptimizer:
        packing = LanePacking()
        leader = self.compiling.leader(form, packing=packing)
        leader.want()
        return leader

    def _done(
        self,
        leader: LedOptimizer,
        tail_arguments: TailArguments,
        norm_launch: NormLaunch,
    ) -> tuple[torch.Tensor, ...] | None:
        packed_step = self.packs.packed_step
        assert packed_step is not None
        done = super()._done
        with self.packs.lock:
            packed_step.kept.pack_new(self.optimizer)
            return packed_step.around(
                self.optimizer, lambda: done(leader, tail_arguments, norm_launch)
            )
