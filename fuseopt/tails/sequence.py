"""Tail of a training step in eager's order, written so that Dynamo traces it whole.

It differs from eager's calls in two points, with the same bits. It scales gradients
once for the norm, without memory for the result, and again for the step. And every step
runs; `predication` replaces the writes of a skipped step on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..shadow.whole import NotTraced
from .adapters import Update
from .adaptive import adapt
from .arguments import parameters_of, stepped
from .models import ModelUpdate, update
from .order import arranged
from .stats import begin, table

Tensors = list[torch.Tensor]


class TailInputs:
    """Inputs of a tail: the one argument of the traced function. Dynamo guards its
    attributes.

    `optimizers` are shadows; `steps` are the functions of their steps. `divisor`
    divides gradients before all else, or is None. `scale` is GradScaler's scale, or
    None. `founds` has GradScaler's `found_inf` for each optimizer whose gradients were
    unscaled before the tail, else None. `max_norm`, `max_value`, `adaptive` are limits
    of the clips, None for a clip that is off. `places` are the indices of gradients in
    the order in which the norm is added up, [] for their own order. `order` has the
    dtypes in the order in which torch adds up their norms, [] if there is only one.
    `judged` is true if a norm that is not finite skips a step.
    `averages` are pairs (averages, their sources); `decays` has the decay of each pair.
    `models` are updates of averaged models; `objects` are updates of averages of other
    packages. `copies` are pairs (copies, their sources). `factor` is that of an earlier
    clip, by which gradients must be multiplied, or None. `zeroed` is true if gradients
    are filled with zeros at the end. `measured` is true if statistics of each parameter
    are on.
    """

    #: see `compat.STEPS`
    _fuseopt_steps = True

    optimizers: list[Any]
    steps: list[Callable[[Any], Any]]
    divisor: Any
    scale: torch.Tensor | None
    founds: list[torch.Tensor | None]
    max_norm: Any
    norm_type: float
    max_value: Any
    adaptive: tuple[Any, Any] | None
    places: list[int]
    order: list[torch.dtype]
    judged: bool
    averages: list[tuple[Tensors, Tensors]]
    decays: list[Any]
    models: list[ModelUpdate]
    objects: list[Update]
    copies: list[tuple[Tensors, Tensors]]
    factor: torch.Tensor | None
    zeroed: bool
    measured: bool

    def __init__(self, **tail_inputs: Any) -> None:
        self.__dict__.update(tail_inputs)

    @property
    def skips(self) -> bool:
        """May a step be skipped?"""
        has_found_inf = any(found_inf is not None for found_inf in self.founds)
        return self.scale is not None or has_found_inf or self.judged


def whole(self: TailInputs) -> tuple[torch.Tensor, ...]:
    """Do a whole tail, without skipping steps, which `predication` adds.

    Returns these results, as far as they exist:

    - for each optimizer whether its step is skipped (a bool tensor);
    - for each optimizer whose gradients were unscaled here, the flag for GradScaler
      (1.0 if a gradient is not finite);
    - the total norm;
    - the table of statistics.
    """
    # if Dynamo runs this function untraced, only shadows would step
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced
    grads_of_each = [gradients(optimizer) for optimizer in self.optimizers]
    all_grads = [g for grads in grads_of_each for g in grads]
    inverse = None if self.scale is None else inverse_of(self.scale)
    measured = measure(self, grads_of_each, inverse)
    norm, norm_grads, flags_for_scaler = (
        measured.norm,
        measured.norm_grads,
        measured.flags_for_scaler,
    )
    params = parameters_of(self.optimizers) if self.measured else []
    have_grads = [p.grad is not None for p in params]
    stats_before = begin(params, norm_grads) if params else None
    skips: Tensors = []
    if self.skips:
        for found_inf in measured.found_infs:
            skips.append(skip_of(self, found_inf, norm, all_grads[0].device))
    unit_grads = all_grads
    no_other_clip = self.max_norm is None and self.max_value is None
    if self.adaptive is not None and no_other_clip and self.factor is None:
        # scaled again for the norms of units: a lane cannot have two kinds of norms
        unit_grads = as_seen(self, grads_of_each, inverse)
    if self.divisor is not None:
        torch._foreach_div_(all_grads, self.divisor)
    for k, grads in enumerate(grads_of_each if skips else ()):
        # The factor depends on the norm's launch. So the step's kernel scales gradients
        # again, which costs less than to store them scaled. Nothing that depends on
        # gradients is computed before the flag of the step
        factor = inverse if self.founds[k] is None else None
        if factor is None and self.max_norm is None:
            factor = torch.ones((), dtype=torch.float32, device=all_grads[0].device)
        if factor is not None:
            torch._foreach_mul_(grads, torch.where(skips[k], factor, factor))
    if self.max_norm is not None and norm is not None:
        scale_by_norm(all_grads, self.max_norm, norm)
    if self.factor is not None:
        torch._foreach_mul_(all_grads, self.factor)
    if self.max_value is not None:
        clamp(all_grads, self.max_value)
    if self.adaptive is not None:
        adapt(stepped(self.optimizers), all_grads, *self.adaptive, unit_grads)
    for step, optimizer in zip(self.steps, self.optimizers, strict=True):
        result = step(optimizer)
        if self.factor is not None and result is not None:
            raise NotTraced("the step returns something")
    stats = [] if stats_before is None else [table(params, have_grads, stats_before)]
    afterwards(self)
    if self.zeroed:
        torch._foreach_zero_(all_grads)
    return (*skips, *flags_for_scaler, *([] if norm is None else [norm]), *stats)


class Measurements(NamedTuple):
    """Results computed from gradients before the steps.

    `flags_for_scaler` has the flag for GradScaler of each optimizer that is unscaled
    here. `found_infs` has the flag of each optimizer, None without a scaler.
    `norm_grads` are all gradients, divided and unscaled, whose norms are computed.
    `norm` is the total norm, or None.
    """

    flags_for_scaler: Tensors
    found_infs: list[torch.Tensor | None]
    norm_grads: Tensors
    norm: torch.Tensor | None


def measure(
    inputs: TailInputs, grads_of_each: list[Tensors], inverse: torch.Tensor | None
) -> Measurements:
    """Compute flags and total norm from the gradients of each optimizer; write nothing.
    `inverse` is the factor that unscales, or None.
    """
    flags_for_scaler: Tensors = []
    found_infs: list[torch.Tensor | None] = []
    norm_grads: Tensors = []
    for grads, unscaled_found_inf in zip(grads_of_each, inputs.founds, strict=True):
        found_inf = unscaled_found_inf
        # only for the flag and the norm: in no memory, and both in one lane
        read = grads
        if inputs.divisor is not None:
            read = list(torch._foreach_div(grads, inputs.divisor))
        if inverse is None or unscaled_found_inf is not None:
            norm_grads.extend(read)
        else:
            if inputs.divisor is None:
                read = list(torch._foreach_mul(grads, 1.0))
            found_inf = torch.logical_not(torch.isfinite(largest(read))).float()
            flags_for_scaler.append(found_inf)
            scaled = torch._foreach_mul(read, inverse)
            # the product of a tensor without dimensions has the dtype of the scale
            norm_grads.extend(
                [x.to(g.dtype) for x, g in zip(scaled, grads, strict=True)]
            )
        found_infs.append(found_inf)
    norm = None
    if inputs.max_norm is not None or inputs.judged:
        ordered = arranged(norm_grads, inputs.places)
        ordered_by_dtype = [
            x for dtype in inputs.order for x in ordered if x.dtype == dtype
        ] or ordered
        norm = total_norm(ordered_by_dtype, inputs.norm_type)
    return Measurements(flags_for_scaler, found_infs, norm_grads, norm)


def total_norm(tensors: Tensors, norm_type: float) -> torch.Tensor:
    """Return the result of torch.nn.utils.get_total_norm for tensors in its order."""
    norms = torch.stack(list(torch._foreach_norm(tensors, norm_type)))
    norm: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm


def skip_of(
    inputs: TailInputs,
    found_inf: torch.Tensor | None,
    norm: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Return whether the step of an optimizer is skipped: a bool tensor without
    dimensions.

    `found_inf` is the flag of its gradients, not zero if one is not finite; None
    without a scaler.
    """
    skip = None if found_inf is None else found_inf != 0
    if inputs.judged and norm is not None:
        is_nonfinite = torch.logical_not(torch.isfinite(norm))
        skip = is_nonfinite if skip is None else skip | is_nonfinite
    return torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip


def as_seen(
    inputs: TailInputs, grads_of_each: list[Tensors], inverse: torch.Tensor | None
) -> Tensors:
    """Return the gradients divided and unscaled, as new tensors."""
    result: Tensors = []
    for grads, found_inf in zip(grads_of_each, inputs.founds, strict=True):
        read = grads
        if inputs.divisor is not None:
            read = list(torch._foreach_div(read, inputs.divisor))
        elif grads:
            read = list(torch._foreach_mul(read, 1.0))
        if inverse is not None and found_inf is None:
            scaled = torch._foreach_mul(read, inverse)
            read = [x.to(g.dtype) for x, g in zip(scaled, grads, strict=True)]
        result.extend(read)
    return result


def afterwards(inputs: TailInputs) -> None:
    """Update averages and copies, after the steps."""
    for (averages, source), decay in zip(inputs.averages, inputs.decays, strict=True):
        average(averages, source, decay)
    update(inputs.models)
    for model in inputs.objects:
        model.apply()
    for averages, source in inputs.copies:
        torch._foreach_copy_(averages, source)


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """Return the factor by which GradScaler multiplies gradients, in float32."""
    return scale.double().reciprocal().float()


def gradients(optimizer: Any) -> Tensors:
    """Return the gradients of an optimizer, in the order of its groups."""
    return [p.grad for p in parameters_of([optimizer]) if p.grad is not None]


def largest(grads: Tensors) -> torch.Tensor:
    """Return the largest absolute value of all elements; not finite if one is not."""
    filled = [g for g in grads if g.numel()]
    return torch.nn.utils.get_total_norm(filled, float("inf"))


def scale_by_norm(grads: Tensors, max_norm: Any, norm: torch.Tensor) -> None:
    """Do the work of torch.nn.utils.clip_grads_with_norm_, also for a limit that is a
    tensor. torch divides a number by a tensor as the product with the tensor's rounded
    reciprocal, and does not round the number to 16 bits. This does so with a tensor.
    """
    torch._foreach_mul_(grads, factor_of(max_norm, norm))


def factor_of(max_norm: Any, norm: torch.Tensor) -> torch.Tensor:
    """Return the factor by which `scale_by_norm` multiplies, in the norm's dtype."""
    inverse = (norm + 1e-6).reciprocal()
    if isinstance(max_norm, torch.Tensor):
        wide = torch.float64 if norm.dtype == torch.float64 else torch.float32
        limit = (inverse.to(wide) * max_norm.to(wide)).to(norm.dtype)
    else:
        limit = inverse * max_norm
    return torch.clamp(limit, max=1.0)


def clamp(grads: Tensors, limit: Any, least: Any = None) -> None:
    """Do the work of torch.nn.utils.clip_grad_value_, also for a limit that is a
    tensor.

    `least` is `-limit`, for a limit that is a number.
    """
    if isinstance(limit, torch.Tensor):
        n = len(grads)
        torch._foreach_clamp_min_(grads, [-limit] * n)
        torch._foreach_clamp_max_(grads, [limit] * n)
    else:
        torch._foreach_clamp_min_(grads, -limit if least is None else least)
        torch._foreach_clamp_max_(grads, limit)


def average(averages: Tensors, source: Tensors, decay: Any, weight: Any = None) -> None:
    """Do the work of torch.optim.swa_utils.get_ema_multi_avg_fn. The decay may be a
    tensor, and the averages may have another dtype than their sources.

    `weight` is `1 - decay`, for a decay that is a number.
    """
    casted = [
        p if p.dtype == a.dtype else p.to(a.dtype)
        for a, p in zip(averages, source, strict=True)
    ]
    if isinstance(decay, torch.Tensor):
        for a, p in zip(averages, casted, strict=True):
            # torch's function for lists reads the tensor as a number, which is not
            # rounded to 16 bits
            wide = torch.float64 if a.dtype == torch.float64 else torch.float32
            weight = (1 - decay).to(wide)
            if a.dtype == wide:
                a.lerp_(p, weight)
            else:
                a.copy_(torch.lerp(a.to(wide), p.to(wide), weight))
    else:
        torch._foreach_lerp_(averages, casted, 1 - decay if weight is None else weight)
