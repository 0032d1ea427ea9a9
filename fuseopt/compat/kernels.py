"""Kernels of eager's on a CPU whose bits are others in some versions of torch.

The rules of `lowering` have the bits of one of two forms. A test of eager says which
form this torch has; a call of another form runs as the ATen call that it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def _numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=drawn).to(dtype) * 4


def _has_two_ways(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Are the numbers that whole vectors leave over computed in another way?"""
    x = _numbers(4096, torch.float32)
    parts = torch.cat([function(part.clone()) for part in torch.split(x, 31)])
    return not torch.equal(function(x), parts)


def _softshrink_keeps_its_number() -> bool:
    """Is the number not rounded to bfloat16 before it is subtracted?"""
    x = torch.tensor([0.30078125], dtype=torch.bfloat16, device="cpu")
    return bool(torch.nn.functional.softshrink(x, 0.3) != 0)


#: By the name of a rule: has eager the form that the rule has?
FORMS: dict[str, Callable[[], bool]] = {
    "cosh": functools.partial(_has_two_ways, torch.cosh),
    "sinh": functools.partial(_has_two_ways, torch.sinh),
    "softshrink": _softshrink_keeps_its_number,
}


@functools.cache
def is_as_ruled(name: str) -> bool:
    """Has this torch's kernel of an op the form that the rule of that name has?"""
    return name not in FORMS or FORMS[name]()
