"""Replace the option for torch's fused kernels by that of its foreach step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from ..inputs.keys import LanesDiffer
from ..runtime.commit import write
from ..shadow.optimizer import Shadow
from ..shadow.stand_in import unfused


class Unfused:
    """Calls steps with the groups' foreach options in place of `fused`.

    The optimizer's groups stay as they are.
    """

    def __init__(self) -> None:
        self.shadow: Shadow | None = None

    def release(self) -> None:
        """Release all that belongs to the optimizer."""
        self.shadow = None

    def call(
        self,
        compiled: Callable[..., Any],
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return `compiled(*args, **kwargs)`; the first argument is the optimizer."""
        try:
            shadow = self.shadow = self.shadow or Shadow(optimizer)
            shadow.refresh(optimizer)
        except LanesDiffer:
            options = unfuse(optimizer)
            try:
                return compiled(*args, **kwargs)
            finally:
                for group, before in options:
                    group.update(before)
        shadow.clean = False
        try:
            return shadow.translated(compiled(shadow.stand_in, *args[1:], **kwargs))
        finally:
            write(shadow.writes())
            shadow.settle()


def unfuse(optimizer: Optimizer) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Set the foreach options in groups that request torch's fused kernels.

    Returns the former options: (group, options).
    """
    options = []
    for group in optimizer.param_groups:
        form = unfused(group)
        if form:
            options.append((group, {k: group[k] for k in form}))
            group.update(form)
    return options
