"""May a step be traced with this torch? Asked once for each state of the switches."""

from __future__ import annotations

from torch.optim import Optimizer

from .. import compat


class Judged:
    """Whether the step of one optimizer may be traced."""

    def __init__(self) -> None:
        #: the state of the switches for which nothing is missing
        self.epoch = -1

    def why_not(self, optimizer: Optimizer) -> str:
        """Why the step may not be traced, where torch lacks something; else ""."""
        if compat.is_sound():
            self.epoch = compat.switches.epoch
            return ""
        return compat.unsound(optimizer)
