"""The tail of a training step as eager does it, written so that Dynamo traces it whole.

Two things are written otherwise than eager's calls, with the same bits: gradients are
scaled once for the norm, which needs no memory, and once more for the step; and every
step is done, to be taken back on the device where it is to be skipped (`predication`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..shadow.whole import NotTraced
from .adapters import Update
from .adaptive import adapt
from .arguments import parameters_of
from .models import Updated, update
from .order import arranged
from .stats import begin, table

Tensors = list[torch.Tensor]


class Given:
    """What a tail is done with: the one object that Dynamo is given, whose attributes
    it guards.

    `optimizers`: shadows; `steps`: the functions of their steps. `divisor`: what
    gradients are divided by before all else, or None. `scale`: GradScaler's,
    None without one; `founds`: of each optimizer, what GradScaler found in gradients
    that were unscaled before, None where they were not. `max_norm`, `max_value`,
    `adaptive`: None where nothing is clipped so. `places`: those of gradients in the
    order of the norm, [] where it is theirs. `order`: of dtypes, in which torch sums
    norms up, [] of one. `judged`: is a step skipped whose norm is not finite?
    `averages`: (averages, what they are of); `decays`: of each.
    `models`: updates of averaged models; `objects`: of those of other packages.
    `copies`: (copies, what they are of). `factor`: what a clip that came before has
    left to this call, or None. `zeroed`: are gradients filled with zeros in
    the end? `measured`: are there to be numbers of each parameter?
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
    models: list[Updated]
    objects: list[Update]
    copies: list[tuple[Tensors, Tensors]]
    factor: torch.Tensor | None
    zeroed: bool
    measured: bool

    def __init__(self, **content: Any) -> None:
        self.__dict__.update(content)

    @property
    def skips(self) -> bool:
        """May a step be skipped?"""
        known = any(found is not None for found in self.founds)
        return self.scale is not None or known or self.judged


def whole(self: Given) -> tuple[torch.Tensor, ...]:
    """Do all of a tail; what is to be skipped is left to `predication`.

    Returns of each optimizer whether it is skipped, then what GradScaler is to be told
    of each whose gradients were unscaled, then the total norm, then the numbers of each
    parameter; of these what there is.
    """
    # where Dynamo lets it run as it is, only shadows would step
    if not torch.compiler.is_dynamo_compiling():
        raise NotTraced
    own = [gradients(optimizer) for optimizer in self.optimizers]
    every = [g for grads in own for g in grads]
    inverse = None if self.scale is None else inverse_of(self.scale)
    measured = measure(self, own, inverse)
    norm, seen, told = measured.norm, measured.seen, measured.told
    params = parameters_of(self.optimizers) if self.measured else []
    held = [p.grad is not None for p in params]
    begun = begin(params, seen) if params else None
    skips: Tensors = []
    if self.skips:
        for found in measured.founds:
            skips.append(skip_of(self, found, norm, every[0].device))
    again = every
    if self.adaptive is not None and self.max_norm is None and self.max_value is None:
        # once more for norms of units: one lane has not two kinds of norms
        again = as_seen(self, own, inverse)
    if self.divisor is not None:
        torch._foreach_div_(every, self.divisor)
    for k, grads in enumerate(own if skips else ()):
        # a number that is known when the norm is. With it the step's kernel scales
        # gradients once more, which costs less than to store them scaled; and nothing
        # that comes of gradients is computed before it is known to be kept
        factor = inverse if self.founds[k] is None else None
        if factor is None and self.max_norm is None:
            factor = torch.ones((), dtype=torch.float32, device=every[0].device)
        if factor is not None:
            torch._foreach_mul_(grads, torch.where(skips[k], factor, factor))
    if self.max_norm is not None and norm is not None:
        scale_by_norm(every, self.max_norm, norm)
    if self.factor is not None:
        torch._foreach_mul_(every, self.factor)
    if self.max_value is not None:
        clamp(every, self.max_value)
    if self.adaptive is not None:
        having = [p for p in parameters_of(self.optimizers) if p.grad is not None]
        adapt(having, every, *self.adaptive, again)
    for step, optimizer in zip(self.steps, self.optimizers, strict=True):
        result = step(optimizer)
        if self.factor is not None and result is not None:
            raise NotTraced("the step returns something")
    stats = [] if begun is None else [table(params, held, begun)]
    afterwards(self)
    if self.zeroed:
        torch._foreach_zero_(every)
    return (*skips, *told, *([] if norm is None else [norm]), *stats)


class Measured(NamedTuple):
    """What is known of gradients before a step: what GradScaler is `told` of each
    optimizer that it unscales, what was found of each, None where nobody looked,
    gradients as they are `seen` by a norm, and the total norm if it is asked for.
    """

    told: Tensors
    founds: list[torch.Tensor | None]
    seen: Tensors
    norm: torch.Tensor | None


def measure(self: Given, own: list[Tensors], inverse: torch.Tensor | None) -> Measured:
    """Look at the gradients `own` of each optimizer; nothing is written. `inverse`:
    what they are unscaled with.
    """
    told: Tensors = []
    founds: list[torch.Tensor | None] = []
    seen: Tensors = []
    for grads, known in zip(own, self.founds, strict=True):
        found = known
        # for flag and norm alone: no memory is written, and both are one lane's
        read = grads
        if self.divisor is not None:
            read = list(torch._foreach_div(grads, self.divisor))
        if inverse is None or known is not None:
            seen.extend(read)
        else:
            if self.divisor is None:
                read = list(torch._foreach_mul(grads, 1.0))
            found = torch.logical_not(torch.isfinite(largest(read))).float()
            told.append(found)
            scaled = torch._foreach_mul(read, inverse)
            # of a tensor without dimensions the product is as wide as the scale
            seen.extend([x.to(g.dtype) for x, g in zip(scaled, grads, strict=True)])
        founds.append(found)
    norm = None
    if self.max_norm is not None or self.judged:
        over = arranged(seen, self.places)
        summed = [x for kind in self.order for x in over if x.dtype == kind] or over
        norm = total_norm(summed, self.norm_type)
    return Measured(told, founds, seen, norm)


def total_norm(tensors: Tensors, norm_type: float) -> torch.Tensor:
    """What torch.nn.utils.get_total_norm gives for tensors that are in its order."""
    norms = torch.stack(list(torch._foreach_norm(tensors, norm_type)))
    norm: torch.Tensor = torch.linalg.vector_norm(norms, norm_type)
    return norm


def skip_of(
    self: Given,
    found: torch.Tensor | None,
    norm: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Is the step of an optimizer skipped, of whose gradients this was `found`?"""
    skip = None if found is None else found != 0
    if self.judged and norm is not None:
        bad = torch.logical_not(torch.isfinite(norm))
        skip = bad if skip is None else skip | bad
    return torch.zeros((), dtype=torch.bool, device=device) if skip is None else skip


def as_seen(self: Given, own: list[Tensors], inverse: torch.Tensor | None) -> Tensors:
    """What gradients are when they are divided and unscaled, in no memory."""
    result: Tensors = []
    for grads, known in zip(own, self.founds, strict=True):
        read = grads
        if self.divisor is not None:
            read = list(torch._foreach_div(read, self.divisor))
        elif grads:
            read = list(torch._foreach_mul(read, 1.0))
        if inverse is not None and known is None:
            scaled = torch._foreach_mul(read, inverse)
            read = [x.to(g.dtype) for x, g in zip(scaled, grads, strict=True)]
        result.extend(read)
    return result


def afterwards(self: Given) -> None:
    """What follows the steps: averages and copies of what they have made."""
    for (own, source), decay in zip(self.averages, self.decays, strict=True):
        average(own, source, decay)
    update(self.models)
    for x in self.objects:
        x.apply()
    for own, source in self.copies:
        torch._foreach_copy_(own, source)


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """What GradScaler multiplies gradients by."""
    return scale.double().reciprocal().float()


def gradients(optimizer: Any) -> Tensors:
    """The gradients of an optimizer, in the order of its groups."""
    return [
        p.grad
        for group in optimizer.param_groups
        for p in group["params"]
        if p.grad is not None
    ]


def largest(grads: Tensors) -> torch.Tensor:
    """The largest size among the elements; not finite if one of them is not."""
    filled = [g for g in grads if g.numel()]
    return torch.nn.utils.get_total_norm(filled, float("inf"))


def scale_by_norm(grads: Tensors, max_norm: Any, norm: torch.Tensor) -> None:
    """What torch.nn.utils.clip_grads_with_norm_ does, with a limit that may be a tensor
    as well: there the quotient of a number and a tensor is a product with the tensor's
    reciprocal, which is rounded, and the number is not rounded to 16 bits.
    """
    torch._foreach_mul_(grads, factor_of(max_norm, norm))


def factor_of(max_norm: Any, norm: torch.Tensor) -> torch.Tensor:
    """What `scale_by_norm` multiplies gradients by."""
    inverse = (norm + 1e-6).reciprocal()
    if isinstance(max_norm, torch.Tensor):
        wide = torch.float64 if norm.dtype == torch.float64 else torch.float32
        limit = (inverse.to(wide) * max_norm.to(wide)).to(norm.dtype)
    else:
        limit = inverse * max_norm
    return torch.clamp(limit, max=1.0)


def clamp(grads: Tensors, limit: Any, least: Any = None) -> None:
    """What torch.nn.utils.clip_grad_value_ does, with a limit that may be a tensor.

    `least`: of a limit that is a number, the same below zero.
    """
    if isinstance(limit, torch.Tensor):
        n = len(grads)
        torch._foreach_clamp_min_(grads, [-limit] * n)
        torch._foreach_clamp_max_(grads, [limit] * n)
    else:
        torch._foreach_clamp_min_(grads, -limit if least is None else least)
        torch._foreach_clamp_max_(grads, limit)


def average(own: Tensors, source: Tensors, decay: Any, weight: Any = None) -> None:
    """What torch.optim.swa_utils.get_ema_multi_avg_fn does, with a decay that may be a
    tensor, and averages that may be of another dtype.

    `weight`: of a decay that is a number, what it lacks to 1.
    """
    cast = [
        p if p.dtype == a.dtype else p.to(a.dtype)
        for a, p in zip(own, source, strict=True)
    ]
    if isinstance(decay, torch.Tensor):
        for a, p in zip(own, cast, strict=True):
            # torch's function of lists takes the tensor for a number, which is not
            # rounded to 16 bits
            wide = torch.float64 if a.dtype == torch.float64 else torch.float32
            weight = (1 - decay).to(wide)
            if a.dtype == wide:
                a.lerp_(p, weight)
            else:
                a.copy_(torch.lerp(a.to(wide), p.to(wide), weight))
    else:
        torch._foreach_lerp_(own, cast, 1 - decay if weight is None else weight)
