"""Interface of a target: a renderer of kernels, with its abilities as fields."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..ir.graph import Kernel, Variant


@dataclass(frozen=True)
class VariantLayout:
    """Layout of the table that one variant reads: its columns, not their contents.

    `slots` pointer columns per lane, `scalars` doubles per scalar row, `lane_values`
    numbers that lane code passes to element code.
    """

    slots: tuple[str, ...]
    scalars: int
    lane_values: int


@dataclass(frozen=True)
class Source:
    """Generated text and its launch layout: a complete artifact.

    `throws`: its C++ uses exceptions, and so needs the C++ library.
    """

    target: str
    text: str
    entry: str
    layout: tuple[VariantLayout, ...]
    throws: bool = False


class Target(ABC):
    """Renders a Kernel.

    The text depends only on the bodies: not on the number of lanes, on shapes, or on
    the value of a scalar.
    """

    name: str
    suffix: str

    @abstractmethod
    def render(self, kernel: Kernel) -> Source:
        """Return source text for all variants of a kernel."""


def lane_values(variant: Variant) -> tuple[int, ...]:
    """Return the lane instructions whose results element or output code needs.

    Scalars and constants are omitted: element code reads them directly.
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
    """Return the layout of one variant's table."""
    slots = tuple(f"{s.domain}:{s.dtype}" for s in variant.slots)
    return VariantLayout(slots, len(variant.scalars), len(lane_values(variant)))
