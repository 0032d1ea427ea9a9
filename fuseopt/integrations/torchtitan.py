"""torchtitan: its container of optimizers, each with a compiled step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer

from ..isolate.compile import compile


class CompiledOptimizers(OptimizersContainer):  # type: ignore[misc]
    """torchtitan's container, with compiled steps.

    A config names `CompiledOptimizers.Config` in place of `OptimizersContainer.Config`.
    Hooks before a step (the balance of experts), the clip and checkpoints stay
    torchtitan's. With `implementation="fused"`, fuseopt's kernels run in place of
    torch's fused ones.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):  # type: ignore[misc]
        """The same options as those of torchtitan's container."""

    def __init__(self, config: Any, *, model_parts: Any) -> None:
        super().__init__(config, model_parts=model_parts)
        for optimizer in self.optimizers:
            compile(optimizer)
