"""CPU kernels of eager whose bits differ between versions of torch.

The rules of `lowering` have the bits of one of two forms. A test of eager shows which
form this torch has. A call with the other form runs as an ATen call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def _numbers(n: int, dtype: torch.dtype) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn(n, generator=drawn).to(dtype) * 4


def _has_two_ways(function: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Does eager compute leftover elements differently from those in whole vectors?"""
    x = _numbers(4096, torch.float32)
    parts = torch.cat([function(part.clone()) for part in torch.split(x, 31)])
    return not torch.equal(function(x), parts)


def _softshrink_keeps_its_number() -> bool:
    """Does softshrink subtract its number without rounding it to bfloat16?"""
    x = torch.tensor([0.30078125], dtype=torch.bfloat16, device="cpu")
    return bool(torch.nn.functional.softshrink(x, 0.3) != 0)


#: Tests by the name of a rule: True if eager has the form of the rule.
FORMS: dict[str, Callable[[], bool]] = {
    "cosh": functools.partial(_has_two_ways, torch.cosh),
    "sinh": functools.partial(_has_two_ways, torch.sinh),
    "softshrink": _softshrink_keeps_its_number,
}


@functools.cache
def is_as_ruled(name: str) -> bool:
    """Does this torch's kernel of an op have the form of the rule with that name?"""
    return name not in FORMS or FORMS[name]()
