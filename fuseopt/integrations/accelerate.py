"""accelerate: compile the optimizer that `prepare` wrapped; clip in two launches."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator, DistributedType
from accelerate.optimizer import AcceleratedOptimizer
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from ..isolate.compile import compile
from ..tails.clip import clip_grad_norm_

#: The types for which accelerate's clip is torch's function, and nothing else.
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def compile_prepared(optimizer: Any, **options: Any) -> Optimizer:
    """Compile the step of an optimizer, within accelerate's wrapper or without one.

    Returns the inner optimizer. Raises UnsupportedInput if a scaler is in use, because
    the wrapper then keeps the step from before `prepare`.
    """
    inner = optimizer
    while isinstance(inner, AcceleratedOptimizer):
        if inner.scaler is not None:
            raise UnsupportedInput(
                "accelerate scales the gradients of this optimizer and has kept its "
                "plain step. Compile the optimizer before accelerator.prepare, or make "
                "it with fuseopt.integrations.classes.compiled(...)"
            )
        inner = inner.optimizer
    made: Optimizer = compile(inner, **options)
    return made


def clip_by(accelerator: Accelerator) -> Accelerator:
    """Let `accelerator.clip_grad_norm_` take two launches; return the accelerator.

    As before, it returns the norm, unscales gradients first, and respects steps that a
    scaler skips. Where accelerate clips in another way (FSDP, DeepSpeed, XLA) it still
    does.
    """
    plain = accelerator.clip_grad_norm_

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        if accelerator.distributed_type not in PLAIN:
            return plain(parameters, max_norm, norm_type=norm_type)
        accelerator.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    accelerator.clip_grad_norm_ = clip
    return accelerator
