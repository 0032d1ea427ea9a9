"""Formats that store a tensor of float32 in fewer bytes, each in plain torch.

The two functions of a format define it. Eager runs them as they are. A compiled step
traces them, so its kernel has their bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch

from ..errors import UnsupportedInput
from ..ir.blocks import SIZES
from .narrow import USUAL, Dynamic, Float8, ScaledFloat8
from .ops import index_like

#: Packed tensors of one tensor, by the name of the part; "" is the first part.
Parts = Mapping[str, torch.Tensor]
WIDE = torch.float32


class Format(Protocol):
    """Storage format of tensors of float32. `name` is the name in the option."""

    name: str

    def refusal(self, wide: torch.Tensor) -> str:
        """Return the reason why the format cannot store a tensor, or ""."""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return packed tensors for one like `wide`, with any contents. `number` is the
        tensor's index among all tensors that an optimizer packs.
        """

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Return the tensor of float32 for its packed tensors."""

    def pack(self, wide: torch.Tensor, parts: Parts) -> None:
        """Write a tensor of float32 to its packed ones."""


class Cast:
    """Store a smaller type of float; torch rounds to the nearest, ties to even."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.dtype = dtype

    def refusal(self, wide: torch.Tensor) -> str:
        """Return ""; a cast stores any tensor."""
        return ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return one tensor of the format's dtype, with the sizes and strides of
        `wide`.
        """
        return {"": torch.empty_like(wide, dtype=self.dtype)}

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Unpack exactly: each number of the smaller type is a float32."""
        return parts[""].to(WIDE)

    def pack(self, wide: torch.Tensor, parts: Parts) -> None:
        """Round to the nearest."""
        parts[""].copy_(wide)


class StochasticBFloat16:
    """Store bfloat16, rounded up or down by chance, so that the mean is exact.

    The part `draw` counts the tensor's roundings. An element's chance depends on `draw`
    and on the element's index alone. So a run from a checkpoint repeats bit for bit,
    with any number of threads and any chunks.
    """

    name = "bf16-stochastic"

    def refusal(self, wide: torch.Tensor) -> str:
        """Return a reason where the indices of elements need more than 31 bits."""
        return "it has 2**31 elements or more" if wide.numel() >= 2**31 else ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return a tensor of bfloat16 and the count. The count is an int64 without
        dimensions; its first value differs between tensors.
        """
        first = (number * 0x9E3779B1) % 2**31
        draw = torch.tensor(first, dtype=torch.int64, device=wide.device)
        return {"": torch.empty_like(wide, dtype=torch.bfloat16), "draw": draw}

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Unpack exactly."""
        return parts[""].to(WIDE)

    def pack(self, wide: torch.Tensor, parts: Parts) -> None:
        """Add 16 random bits below the stored bits, and truncate the sum. Cast a number
        that is not finite.
        """
        chance = _random_bits(index_like(parts[""]), parts["draw"]) & 0xFFFF
        bits = (wide.view(torch.int32) + chance) & -0x10000
        rounded = torch.where(wide.abs() < torch.inf, bits.view(WIDE), wide)
        parts[""].copy_(rounded)
        parts["draw"].add_(1)


class Split:
    """Store two halves: the nearest bfloat16, and the 16 bits that it lacks.

    Move the first part 16 places up and add the second part, an int16: the sum has the
    bits of the float32. So both parts have 32 bits together, and the first one is a
    bfloat16 by itself. Nothing is lost but the kind of a NaN. Ties round away from
    zero.
    """

    name = "split"

    def refusal(self, wide: torch.Tensor) -> str:
        """Return ""; two halves store any tensor."""
        return ""

    def empty(self, wide: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
        """Return a tensor of bfloat16 and one of int16."""
        halves = {"": torch.bfloat16, "low": torch.int16}
        return {x: torch.empty_like(wide, dtype=t) for x, t in halves.items()}

    def unpack(self, parts: Parts) -> torch.Tensor:
        """Unpack exactly."""
        high = parts[""].view(torch.int16).to(torch.int32) << 16
        return (high + parts["low"].to(torch.int32)).view(WIDE)

    def pack(self, wide: torch.Tensor, parts: Parts) -> None:
        """Pack exactly, except that a NaN becomes a quiet one."""
        bits = wide.view(torch.int32)
        high = torch.where(wide == wide, (bits + 0x8000) >> 16, (bits >> 16) | 0x40)
        parts[""].copy_(high.to(torch.int16).view(torch.bfloat16))
        parts["low"].copy_((bits - (high << 16)).to(torch.int16))


def _random_bits(index: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
    """Return 32 bits for each element of a draw: a counter, mixed.

    The mixing is `lowbias32` (C. Wellons, "Prospecting for hash functions", 2018).
    Shifts of int32 copy the sign; a mask removes it.
    """
    x = (index * -0x61C88647) ^ (draw.to(torch.int32) * 0x3C6EF372)
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)


#: Formats of blocks, by the name before the number of elements of a block.
BLOCKS: dict[str, Callable[[str, int], Format]] = {
    "8bit": lambda name, size: Dynamic(name, size, None),
    "8bit-signed": lambda name, size: Dynamic(name, size, 1),
    "8bit-unsigned": lambda name, size: Dynamic(name, size, 0),
    "fp8-e4m3": lambda name, size: ScaledFloat8(name, torch.float8_e4m3fn, size),
    "fp8-e5m2": lambda name, size: ScaledFloat8(name, torch.float8_e5m2, size),
}


def _in_blocks() -> Iterator[Format]:
    for name, make in BLOCKS.items():
        for size in SIZES:
            yield make(f"{name}/{size}", size)


#: All formats. `8bit` is `8bit/256`.
_ALL: tuple[Format, ...] = (
    Cast("bf16", torch.bfloat16),
    Cast("fp16", torch.float16),
    StochasticBFloat16(),
    Split(),
    Float8("fp8-e4m3", torch.float8_e4m3fn),
    Float8("fp8-e5m2", torch.float8_e5m2),
    *_in_blocks(),
)
FORMATS: dict[str, Format] = {x.name: x for x in _ALL}


def format_named(name: object) -> Format:
    """Return the format with this name. Raises UnsupportedInput."""
    if isinstance(name, str) and name.startswith("8bit") and "/" not in name:
        name = f"{name}/{USUAL}"
    if isinstance(name, str) and name in FORMATS:
        return FORMATS[name]
    kind, slash, _ = name.partition("/") if isinstance(name, str) else ("", "", "")
    if slash and kind in BLOCKS:
        raise UnsupportedInput(
            f"storage {name!r}: blocks have {', '.join(map(str, SIZES))} elements"
        )
    known = [*(x for x in FORMATS if "/" not in x), *(f"{x}/{USUAL}" for x in BLOCKS)]
    raise UnsupportedInput(
        f"storage {name!r}: there is no such format; known: {', '.join(known)}"
    )
