"""lightning: a callback for its Trainer, `Trainer(..., callbacks=[Compile()])`."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from ..isolate.compile import compile


class Compile(Callback):  # type: ignore[misc]
    """Compiles the steps of all optimizers that a module configures, before the first.

    Clips, schedules, closures, hooks and checkpoints stay lightning's. `options`: those
    of `fuseopt.compile`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Compile, when the trainer calls this after it has made the optimizers."""
        for optimizer in trainer.optimizers:
            compile(optimizer, **self.options)
