"""Adaptive clipping of gradients: each unit by the norm of its parameters.

A unit is what makes one output: a row of a matrix, a filter of a convolution, the whole
of a tensor with one dimension. (Brock and others, 2021.)
"""

from __future__ import annotations

from typing import Any

import torch

from .arguments import checked_limit

Tensors = list[torch.Tensor]
#: The least norm that parameters are taken to have, where none is given.
EPS = 1e-3


def checked_adaptive(given: Any) -> tuple[Any, Any] | None:
    """A factor, or a factor and the least norm of parameters; or None."""
    if given is None:
        return None
    pair = given if isinstance(given, (tuple, list)) else (given, EPS)
    if len(pair) != 2 or None in pair:
        raise ValueError(f"clip_grad_adaptive is {given!r}; it is (factor, eps)")
    factor = checked_limit("the factor of clip_grad_adaptive", pair[0])
    return factor, checked_limit("the eps of clip_grad_adaptive", pair[1])


def adapt(
    params: Tensors, grads: Tensors, factor: Any, eps: Any, measured: Tensors
) -> None:
    """Clip the gradients of parameters; traced, and in eager. `measured`: of what norms
    are taken, which holds what the gradients do, and may be known before.
    """
    for p, g, same in zip(params, grads, measured, strict=True):
        limit = unit_norms(p).clamp_(min=eps).mul_(factor)
        norm = unit_norms(same)
        clipped = g * (limit / norm.clamp(min=1e-6))
        g.copy_(torch.where(norm < limit, g, clipped))


def unit_norms(x: torch.Tensor) -> torch.Tensor:
    """The 2-norm of each unit, in a shape that fits beside the tensor."""
    dims = tuple(range(1, x.dim())) or None
    norms: torch.Tensor = torch.linalg.vector_norm(x, dim=dims, keepdim=x.dim() > 1)
    return norms
