"""What a target is: a renderer of kernels, with what it can and cannot do as fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..ir.graph import Kernel, Variant


@dataclass(frozen=True)
class VariantLayout:
    """The table that one variant reads: what its columns are, not their contents.

    `slots` pointer columns per lane, `scalars` doubles per scalar row, `lane_values`
    numbers that lane code hands to element code.
    """

    slots: tuple[str, ...]
    scalars: int
    lane_values: int


@dataclass(frozen=True)
class Source:
    """Generated text and the launch layout beside it: a complete artifact.

    `throws`: its C++ knows exceptions, and so needs the library of C++.
    """

    target: str
    text: str
    entry: str
    layout: tuple[VariantLayout, ...]
    throws: bool = False


class Target(ABC):
    """Renders a Kernel. The text depends on the bodies alone: not on the number of
    lanes, on shapes, or on the value of a scalar.
    """

    name: str
    suffix: str

    @abstractmethod
    def render(self, kernel: Kernel) -> Source:
        """Source text for all variants of a kernel."""


def lane_values(variant: Variant) -> tuple[int, ...]:
    """Lane instructions whose results element or output code needs, by number.

    Scalars and constants are left out: element code reads them where it needs them.
    """
    lane = set(variant.lane_code)
    needed: set[int] = set()
    for i in (*variant.code, *variant.output_code):
        needed.update(a for a in variant.instrs[i].args if a in lane)
    needed.update(
        i for i, s in variant.stores if i in lane and variant.slots[s].domain != "lane"
    )
    free = ("scalar", "const", "tail")
    return tuple(i for i in sorted(needed) if variant.instrs[i].op not in free)


def layout(variant: Variant) -> VariantLayout:
    """The layout of one variant's table."""
    slots = tuple(f"{s.domain}:{s.dtype}" for s in variant.slots)
    return VariantLayout(slots, len(variant.scalars), len(lane_values(variant)))
