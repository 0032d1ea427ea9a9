"""First launch of a tail of several led optimizers: one norm, and the flags of each.

It does the work of `totals` for gradients of several optimizers. It runs before the
steps, and by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from .order import dtypes_in_order
from .totals_graph import Factors, Graphs, Tensors, TotalsGraph, needed, numbers_of


class SharedTotals(Graphs[TotalsGraph]):
    """Graphs of the first launch."""

    def __call__(
        self,
        tail_inputs: Mapping[str, Any],
        grads: Tensors,
        read: Sequence[Tensors],
        widened: Sequence[bool],
    ) -> tuple[list[Factors], Tensors]:
        """Launch; return the factors of each optimizer, and the results of
        `sequence.whole`.

        `grads` are the gradients that the steps use. `read` has, for each optimizer,
        the tensors with their contents. `widened`: true if these have 16 bits and the
        step's do not. Raises LanesDiffer, CaptureError, CannotBuild, UnsupportedInput.
        """
        if not needed(tail_inputs):
            return [Factors(None, None, tail_inputs["factor"]) for _ in read], []
        order = dtypes_in_order(grads, tail_inputs["places"])
        of_all, numbers = (tail_inputs, order, read, widened), numbers_of(tail_inputs)
        common = self.config, self.notify

        def make() -> TotalsGraph:
            return TotalsGraph(*of_all, *common, [])

        more = *widened, *order
        graph = self._graph(tail_inputs, numbers, read, [], more, make)
        results = graph.fresh.take()
        begun = graph.pending.start()
        try:
            graph.step(*graph.arguments([*chain(*read)], [], results, numbers))
            graph.pending.finish(begun)
        finally:
            graph.pending.drop()
        return graph.factors, results
