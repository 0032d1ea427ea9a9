"""Clip gradients adaptively: each unit by the norm of its parameters.

A unit computes one output: a row of a matrix, a filter of a convolution, the whole of a
tensor with one dimension. (Brock and others, 2021.)
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import checked_limit

Tensors = list[torch.Tensor]
#: Default of eps: smaller norms of parameters count as this one.
EPS = 1e-3


def checked_adaptive(option: Any) -> tuple[Any, Any] | None:
    """Return the pair (factor, eps) of an option, or None. Raises ValueError."""
    if option is None:
        return None
    pair = option if isinstance(option, (tuple, list)) else (option, EPS)
    if len(pair) != 2 or None in pair:
        raise ValueError(f"clip_grad_adaptive is {option!r}; it is (factor, eps)")
    factor = checked_limit("the factor of clip_grad_adaptive", pair[0])
    return factor, checked_limit("the eps of clip_grad_adaptive", pair[1])


def adapt(
    params: Tensors, grads: Tensors, factor: Any, eps: Any, measured: Tensors
) -> None:
    """Clip the gradients of parameters; traced, and in eager. The norms are those of
    `measured`, tensors equal to the gradients.
    """
    for p, g, measured_grad in zip(params, grads, measured, strict=True):
        limit = unit_norms(p).clamp_(min=eps).mul_(factor)
        norm = unit_norms(measured_grad)
        clipped = g * (limit / norm.clamp(min=1e-6))
        g.copy_(torch.where(norm < limit, g, clipped))


def unit_norms(x: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm of each unit, in a shape that broadcasts to the tensor's."""
    dims = tuple(range(1, x.dim())) or None
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=dims, keepdim=x.dim() > 1)
    return norms
