"""What a call of a tail has done."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Outcome:
    """What a call of a tail has done; nothing of it waits for the device.

    `norm`: the total norm before it was clipped, None where it was not asked for.
    `skips`: of each optimizer whether its step was skipped, bools or tensors. `stats`:
    see `stats.COLUMNS`; None where they were not asked for.
    """

    __slots__ = ("norm", "skips", "stats")

    def __init__(
        self,
        norm: torch.Tensor | None,
        skips: Sequence[bool | torch.Tensor],
        stats: torch.Tensor | None = None,
    ) -> None:
        self.norm = norm
        self.skips = tuple(skips)
        self.stats = stats

    @property
    def skipped(self) -> bool | torch.Tensor:
        """Was a step skipped?"""
        first, *others = self.skips
        for other in others:
            first = first | other
        return first

    def __repr__(self) -> str:
        return f"Outcome(norm={self.norm}, skipped={self.skipped})"
