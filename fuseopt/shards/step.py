"""An optimizer of DTensors -> its step, compiled for the parts that this process has.

What is done to parts is what eager does to the whole where each element is treated
alike: no sums, no sizes, no rows, no products of matrices. That is proven: by the proof
that lanes of several sizes need as well, of the code; by the dry run and the capture,
of each call of ATen. Any other step runs in eager, and the user is told what it needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from ..compiler.report import Report
from ..replicate.driver import Representatives
from ..replicate.rehearsal import beyond
from ..runtime.guards.given import Misfit
from ..shadow.lanes import Unlike
from ..uniformity import prove
from .local import LocalOptimizer, is_spread, placed
from .needs import op_of_wholes


class Shards:
    """The step of one optimizer, if parameters of it are DTensors."""

    def __init__(
        self, function: Any, options: Mapping[str, Any], told: list[Report]
    ) -> None:
        self.function = function
        self.options = options
        self.told = told
        self.local: LocalOptimizer | None = None
        self.few: Representatives | None = None
        self.spread = self.asked = False
        #: why not, for good, and the op that needs whole tensors
        self.why = ""
        #: then: is it proven of the code that it does no more than call ATen, and asks
        #: of tensors no more than sizes?
        self.treats_tensors_alone = False

    def release(self) -> None:
        """Keep nothing of the optimizer."""
        if self.few is not None:
            self.few.release()
        self.local = self.few = None

    def wants(self, optimizer: Optimizer, anew: bool = False) -> bool:
        """Was a parameter of it a DTensor? `anew`: is one now?"""
        if not self.spread and (anew or not self.asked):
            self.spread, self.asked = is_spread(optimizer), True
        return self.spread

    def step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> tuple[bool, str]:
        """Do one step: was it done, and why not; "" where there is nothing to compile:
        no gradient, or Dynamo is told to let it run as it is.

        `make(backend)` compiles the step's function anew. Why not tells how parameters
        are placed.
        """
        done, why = self._step(optimizer, make)
        return done, f"{why} (placed as {placed(optimizer)})" if why else ""

    def _step(
        self, optimizer: Optimizer, make: Callable[..., Callable[..., Any]]
    ) -> tuple[bool, str]:
        if self.few is not None and self.few.why:
            return False, self.why or self.few.why
        try:
            local = self.local = self.local or LocalOptimizer(optimizer)
            try:
                local.refresh(optimizer, self._helper())
                if local.idle:
                    return False, ""
                few = self.few = self.few or self._led(local)
                if few.why:  # as options say
                    return False, few.why
                done = few.step(local.itself, make, local.given)
                if not done:
                    self._learn_why(local, few)
            finally:
                local.given.drop()
        except (Unlike, Misfit) as error:
            return False, str(error)
        if done:
            local.settle()
        return done, "" if done else self.why

    def _learn_why(self, local: LocalOptimizer, few: Representatives) -> None:
        """Why a step needs more than parts, with the op, if there is one."""
        self.why = few.why
        if not few.why:
            return
        if "needs whole tensors" not in few.why:
            local.given.put()
            op = op_of_wholes(self.function, local.itself)
            self.why += f"; {beyond(op)}" if op else ""
        proof = prove(self.function, local.itself)
        self.treats_tensors_alone = not (proof.why or proof.classes)

    def _led(self, local: LocalOptimizer) -> Representatives:
        given = self.function, self.options, self.told
        return Representatives(*given, outward=local.outward)

    def _helper(self) -> ctypes.PyDLL | None:
        """The library of the guards, if it may read what lies in memory."""
        few = self.few
        return few.helper if few is not None and few.task.config.raw_fields else None
