"""Compile the step of an optimizer of DTensors, on their local parts.

A step of local parts has the result of eager's step if it treats each element alike:
without sums, sizes, rows, or products of matrices. fuseopt proves that. For the code it
uses the proof that lanes of several sizes need too. For each ATen call it uses the
rehearsal and the capture. Steps without a proof run in eager, and a Report names the op
that needs whole tensors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from ..compat.facts import ENTRY, Fact, attributes
from ..compiler.report import Report
from ..inputs.keys import LanesDiffer
from ..inputs.pending_gradients import GradientsInC, PartMismatch
from ..replicate.driver import LedOptimizer
from ..replicate.rehearsal import beyond
from ..uniformity import prove
from .local import LocalOptimizer
from .needs import op_of_wholes
from .placement import is_spread, placed


def helper_of(leader: LedOptimizer | None) -> ctypes.PyDLL | None:
    """Return the guards' library, if it may read fields of objects in memory."""
    if leader is None or not leader.task.config.raw_fields:
        return None
    return leader.recent.helper


class Shards:
    """Step of one optimizer whose parameters may be DTensors."""

    def __init__(
        self, function: Any, options: Mapping[str, Any], reports: list[Report]
    ) -> None:
        self.function = function
        self.options = options
        self.reports = reports
        self.local: LocalOptimizer | None = None
        self.leader: LedOptimizer | None = None
        self.spread = self.plain = False  # set by the first call
        #: the reason why no step is compiled, with the op that needs whole tensors
        self.refusal = ""
        #: with a `refusal`, true if the code provably only calls ATen, and reads of
        #: tensors only the sizes
        self.treats_tensors_alone = False

    def release(self) -> None:
        """Release everything that was compiled for the optimizer."""
        if self.leader is not None:
            self.leader.release()
        self.local = self.leader = None

    def wants(self, optimizer: Optimizer, anew: bool = False) -> bool:
        """Was a parameter a DTensor in the first call? With `anew`, is one now?"""
        if not self.spread and (anew or not self.plain):
            self.spread = is_spread(optimizer)
            self.plain = not self.spread
        return self.spread

    def step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> tuple[bool, str]:
        """Do one step. Return whether it was done, and the reason if not, with the
        placements of parameters. The reason is "" if there is nothing to compile: no
        gradient, or the user's stance forbids Dynamo to compile.

        `make(backend)` compiles the step's function.
        """
        did_step, refusal = self._step(optimizer, make)
        return did_step, f"{refusal} (placed as {placed(optimizer)})" if refusal else ""

    def _step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> tuple[bool, str]:
        if self.leader is not None and self.leader.refusal:
            return False, self.refusal or self.leader.refusal
        try:
            local = self.local = self.local or LocalOptimizer(optimizer)
            try:
                local.refresh(optimizer, self.helper())
                if local.idle:
                    return False, ""
                leader = self.leader = self.leader or self._led(local)
                if leader.refusal:  # as the options require
                    return False, leader.refusal
                did_step = leader.step(local.stand_in, make, local.given)
                if not did_step:
                    self._learn_why(local, leader)
            finally:
                local.given.drop()
        except (LanesDiffer, PartMismatch) as error:
            return False, str(error)
        if did_step:
            local.settle()
        return did_step, "" if did_step else self.refusal

    def facts(self) -> tuple[list[Fact], GradientsInC] | None:
        """Return the facts around a step that repeats the last one, and what reads its
        gradients. None while Python does that.
        """
        local, leader = self.local, self.leader
        if local is None or leader is None or local.given.in_c is None:
            return None
        in_c = local.given.in_c
        facts = [
            *attributes(self, "leader", "local", "refusal", "spread"),
            *attributes(leader, "refusal", "steady"),
            *attributes(local, "stand_in", "_watch", "given"),
            Fact(ENTRY, vars(local), "_known", True),
            Fact(ENTRY, vars(local), "_wrote", False),
            *local.given.facts(),
            *in_c.facts,
        ]
        return facts, in_c

    def _learn_why(self, local: LocalOptimizer, leader: LedOptimizer) -> None:
        """Set `refusal`, with the op that needs whole tensors, if there is one."""
        self.refusal = leader.refusal
        if not leader.refusal:
            return
        if "needs whole tensors" not in leader.refusal:
            local.given.put()
            op = op_of_wholes(self.function, local.stand_in)
            self.refusal += f"; {beyond(op)}" if op else ""
        proof = prove(self.function, local.stand_in)
        self.treats_tensors_alone = not (proof.refusal or proof.classes)

    def _led(self, local: LocalOptimizer) -> LedOptimizer:
        arguments = self.function, self.options, self.reports
        return LedOptimizer(*arguments, outward=local.outward)

    def helper(self) -> ctypes.PyDLL | None:
        """Return the guards' library, if it may read fields of objects in memory."""
        return helper_of(self.leader)
