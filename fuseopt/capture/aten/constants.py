"""Constant tensors of a step, whose contents are known when it is captured.

A step runs on meta tensors, but `torch.tensor([...])`, a NumPy number or a tensor in
the graph are real. Arithmetic on real tensors alone is done once, at capture; a real
tensor that is used with the step's tensors becomes memory that a fill or a `Constant`
writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .dtypes import DTYPE_NAMES


@dataclass(frozen=True)
class Constant:
    """The function of an extern without arguments: returns a copy of `tensor`."""

    tensor: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.tensor.detach().clone()


def as_number(t: torch.Tensor) -> Any:
    """The number that a fill can write in place of a tensor; None if there is none."""
    if t.dim() or t.dtype not in DTYPE_NAMES or t.is_neg():
        return None
    value = t.item()
    exact = isinstance(value, float) or abs(value) < 2**53
    return value if exact else None


def swap(x: Any, constant: Any) -> Any:
    """`x` with `constant(t)` in place of each real tensor t, in lists or not."""
    if isinstance(x, torch.Tensor):
        return x if x.is_meta else constant(x)
    if type(x) in (list, tuple):
        return type(x)([swap(y, constant) for y in x])
    return x
