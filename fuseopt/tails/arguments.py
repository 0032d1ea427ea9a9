"""Check the arguments of a tail, before any write."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise, repeat
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from .. import compat
from ..errors import FuseoptError, NotAnOptimizer
from ..replicate.models import reach_of

Tensors = list[torch.Tensor]
_GRAD = attrgetter("grad")


def optimizers_of(argument: Any) -> list[Optimizer]:
    """Return one optimizer, or several, as a list. Raises NotAnOptimizer."""
    optimizers = [argument] if isinstance(argument, Optimizer) else None
    if optimizers is None and isinstance(argument, (list, tuple)):
        optimizers = list(argument)
    if not optimizers or not all(isinstance(x, Optimizer) for x in optimizers):
        raise NotAnOptimizer(
            "fuseopt.tail takes a torch.optim.Optimizer or a list of them, not "
            f"{type(argument).__name__!r}"
        )
    if len({*map(id, optimizers)}) < len(optimizers):
        raise ValueError("fuseopt.tail has an optimizer twice in its list")
    return optimizers


def entries_of(given: Iterable[Any]) -> list[Any]:
    """Return the list itself, which each call reads; for anything else, a list."""
    return given if isinstance(given, list) else [*given]


def parameters_of(optimizers: Iterable[Optimizer]) -> Tensors:
    """Return all parameters, in the order of their groups."""
    # Dynamo traces this too
    return [
        p
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]


def stepped(optimizers: Iterable[Optimizer]) -> Tensors:
    """Return the parameters that have a gradient, in the order of their groups."""
    return [p for p in parameters_of(optimizers) if p.grad is not None]


def gradients_of(params: Iterable[torch.Tensor]) -> Tensors:
    """Return the gradients that are not None, in the order of their parameters."""
    return [g for g in map(_GRAD, params) if g is not None]


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Do two tensors share memory?"""
    spans = sorted((t.data_ptr(), _bytes(t)) for t in tensors if t.numel())
    return any(a + n > b for (a, n), (b, _) in pairwise(spans) if a)


def _bytes(t: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last one."""
    if t.is_contiguous():
        return t.nbytes
    return t.itemsize * reach_of(t.shape, t.stride())


def clear(params: Iterable[torch.Tensor]) -> None:
    """Set all gradients to None, in one call of C."""
    collections.deque(map(setattr, params, repeat("grad"), repeat(None)), 0)


def check_zero_grad(option: Any) -> None:
    """Raise ValueError for what `zero_grad` cannot be."""
    if option not in (True, False, "zeros"):
        raise ValueError(
            f"zero_grad is {option!r}; it is True (set to None), 'zeros' or False"
        )


def check_unclaimed(
    optimizers: Iterable[Optimizer], tails: Mapping[Optimizer, Callable[[], Any]]
) -> None:
    """Raise FuseoptError for a second tail of an optimizer. `tails` has weak references
    to the existing ones.
    """
    for optimizer in optimizers:
        existing = tails.get(optimizer)
        if existing is not None and existing() is not None:
            raise FuseoptError(
                f"this {type(optimizer).__name__} already has a tail. Delete that tail "
                "before you make a second one"
            )


def checked_limit(name: str, limit: Any) -> Any:
    """Return a limit above zero, as a float or a tensor without dimensions, whose value
    is not read; or None. Raises ValueError.
    """
    if limit is None:
        return None
    if isinstance(limit, torch.Tensor):
        if limit.numel() != 1:
            raise ValueError(f"{name} is a tensor of {limit.numel()} numbers, not one")
        return limit.reshape(()) if limit.dim() else limit
    value = float(limit)
    if not value > 0:
        raise ValueError(f"{name} is {limit!r}; it must be above zero")
    return value


def checked_decay(decay: Any) -> Any:
    """Return a decay between 0 and 1, as a float or a tensor without dimensions, whose
    value is not read. Raises ValueError.
    """
    if isinstance(decay, torch.Tensor):
        if decay.numel() != 1:
            raise ValueError(
                f"a decay of {decay.numel()} numbers; it must be one number"
            )
        return decay.reshape(()) if decay.dim() else decay
    value = float(decay)
    if not 0 <= value <= 1:
        raise ValueError(f"a decay of {decay!r}; it must lie between 0 and 1")
    return value


def check_beside(
    what: str, tensors: Sequence[Any], source: Sequence[Any], any_dtype: bool = False
) -> None:
    """Raise ValueError or TypeError unless each of `tensors` has the shape and device
    of its tensor in `source`, and separate memory. With `any_dtype` they may be
    integers.
    """
    if len(tensors) != len(source):
        raise ValueError(
            f"{what} has {len(tensors)} tensors, and there are {len(source)} parameters"
        )
    addresses = {_memory(p) for p in source if p.numel()} - {0}
    for i, (tensor, p) in enumerate(zip(tensors, source, strict=True)):
        name = f"{what}, tensor {i}:"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} a {type(tensor).__name__}")
        if tensor.shape != p.shape:
            raise ValueError(
                f"{name} its shape is {[*tensor.shape]}, the parameter's {[*p.shape]}"
            )
        if tensor.device != p.device:
            raise ValueError(
                f"{name} on {tensor.device}, and the parameter on {p.device}"
            )
        if not any_dtype and not tensor.is_floating_point():
            raise ValueError(f"{name} of {tensor.dtype}, which holds no averages")
        if tensor.numel() and _memory(tensor) in addresses:
            raise ValueError(f"{name} it shares memory with a parameter")


def _memory(t: torch.Tensor) -> int:
    """Return the address of a tensor's memory, of a DTensor that of its local part."""
    part = compat.local_part(t) if compat.are_spread([t]) else t
    return part.untyped_storage().data_ptr()


def checked_scaler(scaler: Any) -> torch.amp.GradScaler | None:
    """Return an enabled GradScaler, or None. Raises TypeError for objects of other
    classes and for scalers with their own methods to unscale or step.
    """
    if scaler is None:
        return None
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(
            f"scaler is a {type(scaler).__name__}, not a torch.amp.GradScaler"
        )
    if not scaler.is_enabled():
        return None
    if not compat.is_plain_scaler(scaler):
        raise TypeError(
            f"{type(scaler).__name__} overrides how a GradScaler unscales or steps, "
            "which a tail does not support. Call it around the optimizer's compiled "
            "step instead"
        )
    return scaler
