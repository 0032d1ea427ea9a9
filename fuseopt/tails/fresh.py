"""Tensors without dimensions that a tail gives away, each once.

To make one in the midst of a call takes as long as a small kernel, since nothing of
what makes it is in the processor's caches. So many are made at a time, and a kernel
writes to the next ones what the caller is to have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensors = list[torch.Tensor]
#: For so many calls they are made at a time.
CALLS = 32


class Fresh:
    """Tensors of some dtypes, of each one a call."""

    def __init__(self, dtypes: Sequence[torch.dtype], device: torch.device) -> None:
        self.dtypes = dtypes
        self.device = device
        self._ready: list[Tensors] = []

    def take(self) -> Tensors:
        """Those of a call, which are nobody else's."""
        if not self._ready:
            with torch.inference_mode(False):
                self._ready = [
                    [torch.empty((), dtype=d, device=self.device) for d in self.dtypes]
                    for _ in range(CALLS)
                ]
        return self._ready.pop()
