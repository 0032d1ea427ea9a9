"""`fuseopt.tail`: check the arguments, and make a Tail of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..compiler.session import session
from ..config import resolve
from .adaptive import checked_adaptive
from .arguments import (
    check_unclaimed,
    checked_limit,
    checked_scaler,
    optimizers_of,
    parameters_of,
)
from .averages import Averages
from .masters import check_masters, masters_of
from .norm_groups import NormGroup, together
from .order import ClipOrder
from .tail import Tail


def tail(
    optimizers: Optimizer | Sequence[Optimizer],
    *,
    clip_grad_norm: float | torch.Tensor | None = None,
    norm_type: float = 2.0,
    clip_parameters: Iterable[torch.Tensor] | torch.nn.Module | None = None,
    norm_groups: Iterable[NormGroup] | None = None,
    clip_grad_value: float | torch.Tensor | None = None,
    clip_grad_adaptive: float | tuple[Any, Any] | None = None,
    scaler: torch.amp.GradScaler | None = None,
    ema: Iterable[Any] = (),
    copies: Iterable[torch.Tensor] | None = None,
    zero_grad: bool | str = False,
    error_if_nonfinite: bool = False,
    skip_nonfinite: bool = False,
    grad_divisor: float | torch.Tensor | None = None,
    stats: bool = False,
    names: Iterable[str] | torch.nn.Module | None = None,
    **options: Any,
) -> Tail:
    """Return the tail of a training step. Call it after `backward()`.

    - `ema`: pairs (averages, decay), in the order of the parameters of all groups, or
      triples (averages, their sources, decay). An AveragedModel, or such an object of
      another package, comes in a pair with the model or the parameters that it
      averages.
    - `copies`: tensors into which the parameters are copied, in other dtypes.
    - `zero_grad`: True sets gradients to None and never writes the clipped ones.
      "zeros" fills them with zeros, False leaves the clipped gradients.
    - `clip_parameters`: parameters, or a model, in whose order the total norm is added
      up; by default the order of the groups.
    - `norm_groups`: the processes that have other parts of the norm.
    - `clip_grad_adaptive`: a factor, or (factor, eps).
    - `grad_divisor`: divides gradients before all else, such as the number of
      micro-batches that they are sums of.
    - `stats`: true to measure each parameter; `names`: their names, or their model.
    - `options`: see fuseopt.config.

    Raises NotAnOptimizer, ConfigError, FuseoptError for a second tail of an optimizer.
    Raises TypeError and ValueError for arguments that no tail takes.
    """
    all_optimizers = optimizers_of(optimizers)
    resolve(None, options, of=tail)
    check_unclaimed(all_optimizers, session.tails)
    beside = Averages(ema, copies)
    held = [x for x in map(masters_of, all_optimizers) if x is not None]
    check_masters(held, beside, norm_groups is not None)
    order = ClipOrder(clip_parameters)
    new = Tail(all_optimizers, checked_scaler(scaler), beside, order, **options)
    new.clip_grad_norm, new.clip_grad_value = clip_grad_norm, clip_grad_value
    new.clip_grad_adaptive = clip_grad_adaptive
    new.norm_type, new.zero_grad = norm_type, zero_grad
    new.error_if_nonfinite, new.skip_nonfinite = error_if_nonfinite, skip_nonfinite
    new.stats, new.grad_divisor = stats, grad_divisor
    new.norm_groups = None if norm_groups is None else together(norm_groups)
    new.names = names if isinstance(names, torch.nn.Module) else [*(names or ())]
    for name in ("clip_grad_norm", "clip_grad_value", "grad_divisor"):
        checked_limit(name, getattr(new, name))
    checked_adaptive(clip_grad_adaptive)
    beside.check(parameters_of(all_optimizers))
    for optimizer in all_optimizers:
        session.tails[optimizer] = weakref.ref(new)
    return new
