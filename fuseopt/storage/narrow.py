"""Formats of 8 bits: codes of a table, with or without a scale for each block."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..ir.blocks import count
from ..ir.tables import DYNAMIC, E4M3, E5M2
from .ops import block_first_, block_largest, block_least, lookup, search, spread

#: Elements of a block, where a name gives no number.
USUAL = 256
#: The least scale.
LEAST = 1e-12
#: The table of each float of 8 bits, and its largest number.
FLOATS = {
    torch.float8_e4m3fn: (E4M3, 448.0),
    torch.float8_e5m2: (E5M2, 57344.0),
}
_Parts = Mapping[str, torch.Tensor]
_SINGLE = "it has fewer than two elements"


def _codes_of(wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of float32 as a float of 8 bits, in int32. Ties go to even. A
    number beyond the type becomes the largest number for e4m3fn, infinity for e5m2.
    """
    size = wide.abs()
    code = search(size, torch.zeros_like(size, dtype=torch.int32), FLOATS[dtype][0])
    sign = (wide.view(torch.int32) >> 24) & 0x80
    return torch.where(wide != wide, 127, code) | sign


def _numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Return the float32 numbers of floats of 8 bits."""
    bits = codes.view(torch.uint8).to(torch.int32)
    numbers: torch.Tensor = lookup(bits, torch.zeros_like(bits), FLOATS[codes.dtype][0])
    return numbers


class Dynamic:
    """Store codes of 8 bits, and a scale for each block of `size` elements.

    This is the dynamic block-wise quantization of T. Dettmers and others (arXiv
    2110.02861), with the numbers of torchao. Each of the two maps has 256 numbers; one
    of them has no negative numbers. `part` 0 takes that map and 1 the other one. With
    None each block takes the map that fits it; the sign of its scale encodes the
    choice. With 0, negative numbers become 0.
    """

    def __init__(self, name: str, size: int, part: int | None) -> None:
        self.name, self.size, self.part = name, size, part

    def refusal(self, wide: torch.Tensor) -> str:
        """Return a reason for a tensor that cannot have blocks, else ""."""
        return _SINGLE if wide.numel() < 2 else ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return a tensor of uint8, and float32 scales [blocks]."""
        scale = wide.new_empty(count(wide.numel(), self.size))
        return {"": torch.empty_like(wide, dtype=torch.uint8), "scale": scale}

    def _part(self, below: torch.Tensor) -> torch.Tensor:
        if self.part is None:
            return below.to(torch.int32)
        return torch.full_like(below, self.part, dtype=torch.int32)

    def unpack(self, parts: _Parts) -> torch.Tensor:
        """Multiply a number of the map by the scale."""
        codes = parts[""]
        scale = spread(parts["scale"], list(codes.shape), self.size)
        part = self._part(scale < 0)
        numbers: torch.Tensor = lookup(codes.to(torch.int32), part, DYNAMIC)
        size: torch.Tensor = scale.abs()
        return numbers * size

    def pack(self, wide: torch.Tensor, parts: _Parts) -> None:
        """Store the nearest number of the map; of two, the upper one. A number that is
        not finite spoils its block.
        """
        scale = block_largest(wide.abs(), self.size).clamp(min=LEAST)
        below = block_least(wide, self.size) < 0
        parts[""].copy_(search(wide / scale, self._part(below), DYNAMIC))
        if self.part is None:
            scale = torch.where(below, -scale, scale)
        block_first_(parts["scale"], scale, self.size)


class Float8:
    """Store a float of 8 bits, as torch casts. A number beyond e4m3fn becomes its
    largest number, as in torch since 2.13.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def refusal(self, wide: torch.Tensor) -> str:
        """Return ""; the cast stores any tensor."""
        return ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return one tensor of the format's dtype."""
        return {"": torch.empty_like(wide, dtype=self.dtype)}

    def unpack(self, parts: _Parts) -> torch.Tensor:
        """Unpack exactly."""
        return _numbers_of(parts[""])

    def pack(self, wide: torch.Tensor, parts: _Parts) -> None:
        """Round to the nearest, ties to even."""
        parts[""].view(torch.uint8).copy_(_codes_of(wide, self.dtype))


class ScaledFloat8(Float8):
    """Store a float of 8 bits, divided by a scale for each block of `size` elements.

    The scale maps the block's largest number to the largest of the type, as in torchao.
    """

    def __init__(self, name: str, dtype: torch.dtype, size: int) -> None:
        super().__init__(name, dtype)
        self.size = size

    def refusal(self, wide: torch.Tensor) -> str:
        """Return a reason for a tensor that cannot have blocks, else ""."""
        return _SINGLE if wide.numel() < 2 else ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return a tensor of the format's dtype, and float32 scales [blocks]."""
        scale = wide.new_empty(count(wide.numel(), self.size))
        return {**super().empty(wide, number), "scale": scale}

    def unpack(self, parts: _Parts) -> torch.Tensor:
        """Multiply a number of the type by the scale."""
        codes = parts[""]
        scale: torch.Tensor = spread(parts["scale"], list(codes.shape), self.size)
        return _numbers_of(codes) * scale

    def pack(self, wide: torch.Tensor, parts: _Parts) -> None:
        """Round to the nearest, ties to even. A number that is not finite spoils its
        block.
        """
        largest = block_largest(wide.abs(), self.size).clamp(min=LEAST)
        scale = largest / FLOATS[self.dtype][1]
        codes = _codes_of(wide / scale, self.dtype)
        parts[""].view(torch.uint8).copy_(codes)
        block_first_(parts["scale"], scale, self.size)
