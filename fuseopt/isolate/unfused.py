"""Have an optimizer that asks for torch's fused kernels take its foreach form."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from ..shadow.stand_in import unfused


def unfuse(optimizer: Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Set the foreach options in groups that ask for torch's fused kernels.

    Returns the former options: (group, options).
    """
    options = []
    for group in optimizer.param_groups:
        form = unfused(group)
        if form:
            options.append((group, {k: group[k] for k in form}))
            group.update(form)
    return options
