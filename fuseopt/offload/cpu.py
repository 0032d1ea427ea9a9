"""Optimizer whose weights and state lie in CPU memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from .homes import CPUHome, InPlaceHome
from .optimizer import MasterOptimizer, listed_groups


class CPUOffloadOptimizer(MasterOptimizer):
    """Optimizer that steps parameters of an accelerator on the CPU.

    Weights of the parameters' type, masters, state and gradients lie in CPU memory.
    Each gradient is copied when the backward has accumulated it. After the step the
    weights are copied back. The arguments are those of `MasterOptimizer`. Parameters on
    the CPU are stepped in place. `fuseopt.tail` of this unscales and clips on the CPU.
    """

    def __init__(
        self, params: Any, optimizer_class: Callable[..., Optimizer], **options: Any
    ) -> None:
        groups = listed_groups(params)
        every: list[torch.Tensor] = [p for group in groups for p in group["params"]]
        here = all(p.device.type == "cpu" for p in every)
        home = InPlaceHome() if here else CPUHome()
        super().__init__(groups, optimizer_class, home=home, **options)
