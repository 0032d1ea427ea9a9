"""Check that this torch can trace a step, once for each state of the switches."""

from __future__ import annotations

from torch.optim import Optimizer

from .. import compat


class SoundnessCheck:
    """The result of the check for the step of one optimizer."""

    def __init__(self) -> None:
        #: the state of the switches in which torch lacks nothing
        self.epoch = -1

    def why_not(self, optimizer: Optimizer) -> str:
        """Return the reason why this torch must not trace the step, or ""."""
        if compat.is_sound():
            self.epoch = compat.switches.epoch
            return ""
        return compat.unsound(optimizer)
