"""Common data for writing the parts of a variant with reductions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir.graph import Variant
from ..optable import CPP_TYPES as REGISTER
from .walk import gathers, rooms, scatters

if TYPE_CHECKING:
    from .variant import Function


class Folded:
    """A variant with reductions: its tensors, its folds, the writer of its elements.

    `n` is its number, `v` the variant, and `w` the writer of its element code. `slots`
    are the tensors that are walked by elements, `results` those by results. `kinds` are
    the C++ types of the folds' operands.
    """

    def __init__(self, number: int, variant: Variant, writer: Function) -> None:
        self.w = writer
        self.n = number
        self.v = variant
        self.folds = variant.folds
        self.slots = writer.walked("element")
        self.results = writer.walked("output")
        self.kinds = [REGISTER[variant.instrs[i].dtype] for i in self.folds]

    def kind(self, i: int) -> str:
        """Return the C++ type of an instruction's result."""
        return REGISTER[self.v.instrs[i].dtype]

    def each(self, text: str) -> list[str]:
        """Return a line per fold: {k} its number, {kind} its type."""
        return [text.format(k=k, kind=kind) for k, kind in enumerate(self.kinds)]

    def pointers(self) -> list[str]:
        """Return pointers to all tensors, and memory for a block of each."""
        slots = [*self.slots, *self.results]
        return [*(self.w.pointer(x.slot) for x in slots), *rooms(slots)]

    def block(self, walk: str, e: str, n: str, done: str) -> list[str]:
        """Return element code over n elements at the position of `walk`.

        e: the place of the first element in eager's loop. Folded values go to the
        arrays, from `done` on.
        """
        near = "".join(f", q{x.slot}" for x in self.slots)
        arrays = "".join(self.each(f", y{{k}}{done}"))
        return [
            *gathers(walk, self.slots, n),
            f"piece{self.n}(t, lane, {e}, {n}{near}{arrays});",
            *scatters(walk, self.slots, n),
        ]
