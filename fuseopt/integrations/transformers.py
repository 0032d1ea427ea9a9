"""transformers: a callback for its Trainer, `Trainer(..., callbacks=[Compile()])`."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from .accelerate import clip_by, compile_prepared


class Compile(TrainerCallback):  # type: ignore[misc]
    """Compiles the step of the trainer's optimizer when training begins.

    Groups, options, schedule and checkpoints stay the trainer's. With `fp16`,
    accelerate keeps the optimizer's earlier step. So pass
    `optimizer_cls_and_kwargs=(compiled(AdamW), {...})` of
    `fuseopt.integrations.classes` instead. `clip_for`: the trainer, whose clip then
    takes two launches; it still logs the norm. `options`: those of `fuseopt.compile`.
    """

    def __init__(self, clip_for: Any = None, **options: Any) -> None:
        self.options = options
        if clip_for is not None:
            clip_by(clip_for.accelerator)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        """Compile the optimizer that accelerate has prepared, when the trainer calls
        this.
        """
        compile_prepared(optimizer, **self.options)
