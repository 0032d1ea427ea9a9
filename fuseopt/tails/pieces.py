"""A tail in pieces, as trainers write it: what runs where it cannot be one graph.

The optimizers' steps are called as users call them, with all that is around them; the
host asks whether they are to be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from .adaptive import adapt
from .arguments import parameters_of
from .clip import clip_grad_norm_
from .order import arranged
from .sequence import (
    TailInputs,
    afterwards,
    clamp,
    gradients,
    scale_by_norm,
)
from .stats import begin, table


def run(
    optimizers: Sequence[Optimizer],
    steps: Sequence[Callable[[], Any]],
    scaler: torch.amp.GradScaler | None,
    content: Mapping[str, Any],
    raises: bool,
    compiled: bool,
) -> tuple[torch.Tensor | None, list[bool], torch.Tensor | None]:
    """Do a tail in pieces: the total norm, of each optimizer whether its step was
    skipped, and the numbers of each parameter.

    `steps`: what is called in place of each `optimizer.step`. `content`: the attributes
    of a `TailInputs`. `raises`: raise RuntimeError for a norm that is not finite, as
    torch does. `compiled`: is it worth while to compile a clip?
    """
    given = TailInputs(**content)
    every = [g for optimizer in optimizers for g in gradients(optimizer)]
    with torch.no_grad():
        if every and given.divisor is not None:
            torch._foreach_div_(every, given.divisor)
        if scaler is not None:
            for optimizer in optimizers:
                if compat.stage_of(scaler, optimizer) is compat.STAGES.READY:
                    scaler.unscale_(optimizer)
        norm = None
        limit = given.max_norm
        apart = raises or given.measured or isinstance(limit, torch.Tensor)
        if every and limit is not None and not apart and compat.are_spread(every):
            own = [p for p in parameters_of(optimizers) if p.grad is not None]
            clip = clip_grad_norm_ if compiled else torch.nn.utils.clip_grad_norm_
            norm = clip(arranged(own, given.places), limit, given.norm_type)
            limit = None
        elif limit is not None or given.judged or raises:
            over = arranged(every, given.places)
            norm = torch.nn.utils.get_total_norm(over, given.norm_type, raises)
        params = parameters_of(optimizers) if given.measured else []
        held = [p.grad is not None for p in params]
        begun = begin(params, every) if params else None
        if every and limit is not None and norm is not None:
            scale_by_norm(every, limit, norm)
        if every and given.max_value is not None:
            clamp(every, given.max_value)
        if given.adaptive is not None:
            having = [p for p in parameters_of(optimizers) if p.grad is not None]
            adapt(having, every, *given.adaptive, every)
        lost = given.judged and norm is not None and not bool(torch.isfinite(norm))
    skips: list[bool] = []
    for optimizer, step in zip(optimizers, steps, strict=True):
        skip = lost
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
        if begun is not None:
            stats = table(params, held, begun)
        copies, given.copies = given.copies, []
        afterwards(given)
        for own, source in copies:
            _copy(own, source)
        if given.zeroed and every:
            torch._foreach_zero_(every)
    return norm, skips, stats


def _copy(own: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if not compat.are_spread(own):
        torch._foreach_copy_(own, source)
        return
    for x, p in zip(own, source, strict=True):
        x.copy_(p)  # DTensor has no list of these
