"""How a tensor of float32 is kept in fewer bytes: each format in plain torch.

A format's two functions are its definition. Eager runs them as they are, and a compiled
step traces them, so that its kernel has their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from ..errors import UnsupportedInput

#: The packed tensors of one tensor, by the name of the part; "" is the first part.
Parts = Mapping[str, torch.Tensor]
WIDE = torch.float32


class Format(Protocol):
    """How tensors of float32 are kept. `name`: as a user writes it."""

    name: str

    def refusal(self, wide: torch.Tensor) -> str:
        """Why a tensor cannot be kept so, or ""."""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Packed tensors for one like `wide`, with any contents; `number`: of the
        tensor among all that an optimizer packs.
        """

    def unpack(self, parts: Parts) -> torch.Tensor:
        """The tensor of float32 that the packed ones stand for."""

    def pack(self, wide: torch.Tensor, parts: Parts) -> None:
        """Write a tensor of float32 to its packed ones."""


class Cast:
    """Kept in a smaller type of float; torch rounds to the nearest, ties to even."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def refusal(self, wide: torch.Tensor) -> str:
        """Casts keep any tensor."""
        return ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """One tensor of the format's dtype, with the sizes and strides of `wide`."""
        return {"": torch.empty_like(wide, dtype=self.dtype)}

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Exact: each number of the smaller type is one of float32."""
        return parts[""].to(WIDE)

    def pack(self, wide: torch.Tensor, parts: Parts) -> None:
        """Round to the nearest."""
        parts[""].copy_(wide)


FORMATS: dict[str, Format] = {
    x.name: x for x in (Cast("bf16", torch.bfloat16), Cast("fp16", torch.float16))
}


def format_named(name: object) -> Format:
    """The format with this name. Raises UnsupportedInput."""
    if not isinstance(name, str) or name not in FORMATS:
        raise UnsupportedInput(
            f"storage {name!r}: there is no such format; known: {', '.join(FORMATS)}"
        )
    return FORMATS[name]
