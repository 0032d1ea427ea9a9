"""Result of a call of a tail."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Outcome:
    """Result of a call of a tail; to make it does not wait for the device.

    `norm` is the total norm before the clip, a tensor without dimensions, or None if no
    option needs it. `skips` has for each optimizer whether its step was skipped, bools
    or bool tensors. `stats` is a float32 tensor (parameters, 4), see `stats.COLUMNS`,
    or None.
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
