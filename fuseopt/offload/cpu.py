"""An optimizer whose weights and state lie in the CPU's memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .homes import Here, OnCPU
from .optimizer import MasterOptimizer, listed_groups


class CPUOffloadOptimizer(MasterOptimizer):
    """An optimizer that steps on the CPU what lies on an accelerator.

    Weights of the parameters' type, masters, state and gradients lie in the CPU's
    memory. Each gradient is copied when the backward has added it up; after the step
    the weights are copied back. Arguments as of `MasterOptimizer`; parameters that lie
    on the CPU are stepped there as they are. A clip of the parameters' gradients before
    the step is seen.
    """

    def __init__(
        self, params: Any, optimizer_class: Callable[..., Optimizer], **options: Any
    ) -> None:
        groups = listed_groups(params)
        every: list[torch.Tensor] = [p for group in groups for p in group["params"]]
        here = all(p.device.type == "cpu" for p in every)
        home = Here() if here else OnCPU()
        super().__init__(groups, optimizer_class, home=home, **options)
