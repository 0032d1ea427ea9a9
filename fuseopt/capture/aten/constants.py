"""Constant tensors of a step, whose contents are available at capture.

A step runs on meta tensors, but `torch.tensor([...])`, a NumPy number or a tensor in
the graph are real. Arithmetic on real tensors alone runs once, at capture. A real
tensor that is used with the step's tensors becomes memory, which a fill or a `Constant`
writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .dtypes import DTYPE_NAMES


@dataclass(frozen=True)
class Constant:
    """Function of an extern without arguments: returns a copy of `tensor`."""

    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor.detach().clone()


def as_number(t: torch.Tensor) -> Any:
    """Return the number with which a fill can replace a tensor, or None."""
    if t.dim() or t.dtype not in DTYPE_NAMES or t.is_neg():
        return None
    value = t.item()
    exact = isinstance(value, float) or abs(value) < 2**53
    return value if exact else None


def swap(x: Any, constant: Any) -> Any:
    """Replace each real tensor t in `x`, in lists or not, by `constant(t)`."""
    if isinstance(x, torch.Tensor):
        return x if x.is_meta else constant(x)
    if type(x) in (list, tuple):
        return type(x)([swap(y, constant) for y in x])
    return x
