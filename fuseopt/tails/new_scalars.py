"""Allocate new tensors without dimensions, for the results of a tail's calls.

One allocation in the middle of a call takes as long as a small kernel, since the
processor's caches lack its code and data. So the tensors of many calls are allocated at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = list[torch.Tensor]
#: Number of calls for which tensors are allocated at once.
CALLS = 32


class NewScalars:
    """New tensors on one device, one of each dtype for each call."""

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.dtypes = dtypes
        with torch.inference_mode(False):
            self._models = [torch.empty((), dtype=d, device=device) for d in dtypes]
        self._ready: list[Tensors] = []

    def take(self) -> Tensors:
        """Return the tensors for one call; nothing else refers to them."""
        if not self._ready:
            with torch.inference_mode(False):
                # this takes half the time of `torch.empty`
                self._ready = [
                    [*map(torch.empty_like, self._models)] for _ in range(CALLS)
                ]
        return self._ready.pop()
