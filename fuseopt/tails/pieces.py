"""Run a tail in pieces, as trainers write it, for calls that cannot be one graph.

It calls the optimizers' steps as users do, with all layers around them. The host reads
the flags that decide whether steps are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from .adaptive import adapt
from .arguments import parameters_of, stepped
from .clip import clip_grad_norm_
from .order import arranged
from .sequence import (
    TailInputs,
    afterwards,
    clamp,
    gradients,
    inverse_of,
    largest,
    scale_by_norm,
)
from .stats import begin, table


def run(
    optimizers: Sequence[Optimizer],
    steps: Sequence[Callable[[], Any]],
    scaler: torch.amp.GradScaler | None,
    tail_inputs: Mapping[str, Any],
    raises: bool,
    compiled: bool,
) -> tuple[torch.Tensor | None, list[bool], torch.Tensor | None]:
    """Do a tail in pieces. Return the total norm or None, for each optimizer whether
    its step was skipped, and the table of statistics or None.

    `steps` are called in place of each `optimizer.step`. `tail_inputs` has the
    attributes of a `TailInputs`. With `raises`, a norm that is not finite raises
    RuntimeError, as in torch. With `compiled`, a clip is worth compiling.
    """
    inputs = TailInputs(**tail_inputs)
    all_grads = [g for optimizer in optimizers for g in gradients(optimizer)]
    with torch.no_grad():
        if all_grads and inputs.divisor is not None:
            torch._foreach_div_(all_grads, inputs.divisor)
        if scaler is not None:
            for optimizer in optimizers:
                if compat.stage_of(scaler, optimizer) is compat.STAGES.READY:
                    _unscale(scaler, optimizer, inputs.scale)
        norm = None
        limit = inputs.max_norm
        torch_only = raises or inputs.measured or isinstance(limit, torch.Tensor)
        if (
            all_grads
            and limit is not None
            and not torch_only
            and compat.are_spread(all_grads)
        ):
            clip = clip_grad_norm_ if compiled else torch.nn.utils.clip_grad_norm_
            ordered = arranged(stepped(optimizers), inputs.places)
            norm = clip(ordered, limit, inputs.norm_type)
            limit = None
        elif limit is not None or inputs.judged or raises:
            ordered = arranged(all_grads, inputs.places)
            norm = torch.nn.utils.get_total_norm(ordered, inputs.norm_type, raises)
        params = parameters_of(optimizers) if inputs.measured else []
        have_grads = [p.grad is not None for p in params]
        stats_before = begin(params, all_grads) if params else None
        if all_grads and limit is not None and norm is not None:
            scale_by_norm(all_grads, limit, norm)
        if all_grads and inputs.factor is not None:
            torch._foreach_mul_(all_grads, inputs.factor)
        if all_grads and inputs.max_value is not None:
            clamp(all_grads, inputs.max_value)
        if inputs.adaptive is not None:
            adapt(stepped(optimizers), all_grads, *inputs.adaptive, all_grads)
        norm_is_nonfinite = (
            inputs.judged and norm is not None and not bool(torch.isfinite(norm))
        )
    skips: list[bool] = []
    for optimizer, step in zip(optimizers, steps, strict=True):
        skip = norm_is_nonfinite
        if scaler is not None:
            founds = compat.founds_of(scaler, optimizer)
            skip = skip or any(x.item() for x in founds.values())
        if not skip:
            step()
        skips.append(skip)
        if scaler is not None:
            compat.has_stepped(scaler, optimizer)
    stats = None
    with torch.no_grad():
        if stats_before is not None:
            stats = table(params, have_grads, stats_before)
        copies, inputs.copies = inputs.copies, []
        afterwards(inputs)
        for params_with_grad, source in copies:
            _copy(params_with_grad, source)
        if inputs.zeroed and all_grads:
            torch._foreach_zero_(all_grads)
    return norm, skips, stats


def _unscale(
    scaler: torch.amp.GradScaler, optimizer: Optimizer, scale: torch.Tensor | None
) -> None:
    """Do the work of `scaler.unscale_`. `scale` is the scale, for gradients elsewhere:
    torch copies it to the CPU, and does not wait for the copy.
    """
    grads = gradients(optimizer)
    if scale is None or scale.device == compat.scale_of(scaler).device or not grads:
        scaler.unscale_(optimizer)
        return
    found = torch.logical_not(torch.isfinite(largest(grads))).float()
    torch._foreach_mul_(grads, inverse_of(scale))
    compat.has_unscaled(scaler, optimizer, found)


def _copy(copies: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if not compat.are_spread(copies):
        torch._foreach_copy_(copies, source)
        return
    for x, p in zip(copies, source, strict=True):
        x.copy_(p)  # DTensor has no rule for lists of copies
