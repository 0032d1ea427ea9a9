"""ultralytics: a callback, `model.add_callback("on_train_start", Compile())`."""

from __future__ import annotations

from typing import Any

from ..isolate.compile import compile


class Compile:
    """Compiles the step of a trainer's optimizer when training begins.

    By then the trainer has made the optimizer and loaded a checkpoint's state. Scaler,
    clip, warmup, average and checkpoints stay the trainer's. A training on several GPUs
    takes the callback into each process. `options`: of `fuseopt.compile`.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __call__(self, trainer: Any) -> None:
        """Called by the trainer, with itself."""
        compile(trainer.optimizer, **self.options)
