"""First launch of a led tail: total norm, overflow flags and factors of a step.

The guard of the step that follows compares all gradients. Where possible
(`runtime/linked_step.py`), this launch uses its result, so that a call compares them
only once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..compiler.report import Report
from ..config import Config
from ..replicate.source import compared_by
from ..replicate.tail_arguments import StaleTailInputs
from ..runtime.binding import Binding
from ..runtime.commit import Launches
from ..runtime.linked_step import LinkedStep, link
from ..runtime.step import CompiledStep
from .order import dtypes_in_order
from .totals_graph import (
    Factors,
    Graphs,
    Tensors,
    TotalsGraph,
    is_tensor,
    needed,
    numbers_of,
)


class Totals(Graphs["_LinkedGraph"]):
    """Graphs of the first launch of one optimizer's tail."""

    def of(
        self,
        tail_inputs: Mapping[str, Any],
        grads: Tensors,
        read_grads: Callable[[], Tensors],
        cells_of_grads: Sequence[Tensors] = (),
    ) -> NormLaunch:
        """Return the first launch of a call.

        `tail_inputs` has the attributes of a `TailInputs` without the optimizers.
        `grads` are all gradients; `read_grads` returns those of a later call.
        `cells_of_grads` has two columns of tensors, for the norm of each gradient and
        the number of its elements that are not finite.

        Raises LanesDiffer, CaptureError, CannotBuild, UnsupportedInput.
        """
        cells = [t for column in cells_of_grads for t in column]
        numbers = numbers_of(tail_inputs)
        factor = tail_inputs["factor"]  # of an earlier clip; none is made here
        if not (cells or needed(tail_inputs)):
            factors = Factors(None, None, factor)
            return NormLaunch(None, numbers, read_grads, cells, factors)
        common = self.config, self.notify

        def make() -> _LinkedGraph:
            return _LinkedGraph(tail_inputs, grads, cells, *common)

        graph = self._graph(tail_inputs, numbers, [grads], cells, (), make)
        (factors,) = graph.factors
        if factor is not None:
            factors = factors._replace(clips=factor)
        return NormLaunch(graph, numbers, read_grads, cells, factors)

    def drop(self, norm_launch: NormLaunch) -> None:
        """Release a graph that does not fit the present gradients."""
        for key, graph in [*self._graphs.items()]:
            if graph is norm_launch.graph:
                del self._graphs[key]


class NormLaunch:
    """First launch, for calls with the same inputs besides gradients; see
    `TailArguments.launches_before`.

    `factors` are the tensors that it writes and the step reads.
    """

    def __init__(
        self,
        graph: _LinkedGraph | None,
        numbers: Sequence[Any],
        read_grads: Callable[[], Tensors],
        cells: Tensors,
        factors: Factors,
    ) -> None:
        self.factors = factors
        self.graph = graph
        self.numbers = numbers
        self.read_grads = read_grads
        self.cells = cells

    @property
    def results(self) -> Tensors:
        """Results of the last call, which belong to the caller. They are the skip of
        the step, the flag for GradScaler, and the total norm, as far as they exist.
        """
        return [] if self.graph is None else self.graph.results

    def __call__(self, step: CompiledStep) -> Launches:
        """Prepare the launches. The guard of `step` may have compared all gradients.
        Raises StaleTailInputs if the number of gradients has changed.
        """
        graph = self.graph
        if graph is None:
            return ()
        launches = graph.follow(step, self)
        if launches is not None:
            return launches
        grads = self.read_grads()
        if len(grads) != graph.n:
            raise StaleTailInputs
        graph.prepare(grads, self.cells, self.numbers)
        graph.link(step, self)
        return graph.pending.launches

    def done(self) -> None:
        """Release the tensors of the call, which has ended."""
        if self.graph is not None:
            self.graph.drop()


class _LinkedGraph(TotalsGraph):
    """Graph of one optimizer's tail, whose step may compare the gradients."""

    instead = "All lanes of the tail are traced."

    def __init__(
        self,
        tail_inputs: Mapping[str, Any],
        grads: Tensors,
        cells: Tensors,
        config: Config,
        notify: Callable[[Report], None],
    ) -> None:
        self.results: Tensors = []
        #: the gradients of the call that is under way
        self.grads: Tensors = []
        #: the link to a step's guard, the NormLaunch of the link, and memory to keep
        #: until the launches have run
        self.norm_launch: Callable[[], NormLaunch | None] = lambda: None
        self.linked: LinkedStep | None = None
        self._memory: Any = None
        order = dtypes_in_order(grads, tail_inputs["places"])
        changed = _checked_by(weakref.ref(self))
        of_all = tail_inputs, order, [grads], [False]
        super().__init__(*of_all, config, notify, cells, changed)

    def prepare(self, grads: Tensors, cells: Tensors, numbers: Sequence[Any]) -> None:
        """Prepare the launches, which `pending` then holds."""
        self.linked = None
        self.grads, self.results = grads, self.fresh.take()
        self.pending.start()
        try:
            self.step(*self.arguments(grads, cells, self.results, numbers))
        finally:
            self.grads = []

    def link(self, step: CompiledStep, norm_launch: NormLaunch) -> None:
        """Use the guard of a step that has compared the gradients of this call, if
        possible, in later calls. `norm_launch` has the other inputs.
        """
        compared = compared_by(step)
        if compared is None or len(compared.places) != self.n:
            return
        numbers = [norm_launch.numbers[k] for k in self.order]
        other_tensors = [*filter(is_tensor, numbers)]
        unshared = self.n + len(self.factor_tensors) + self.n_cells, len(self.results)
        self.linked = link(self.step, *compared, unshared, other_tensors)
        self.norm_launch = weakref.ref(norm_launch)

    def follow(self, step: CompiledStep, norm_launch: NormLaunch) -> Launches | None:
        """Return the launches for gradients that `step` has compared. Return None if
        there is no link to that guard, for calls with the inputs of `norm_launch`.
        """
        if self.linked is None or self.norm_launch() is not norm_launch:
            return None
        results = self.fresh.take()
        launches_and_memory = self.linked.launches(self.step, step, results)
        if launches_and_memory is None:
            return None
        self.results = results
        launches, self._memory = launches_and_memory
        return launches

    def drop(self) -> None:
        """Release what belongs to the call."""
        self._memory = None
        if self.pending.open:
            self.pending.drop()

    def forget(self) -> None:
        """Forget the record of the last call."""
        self.linked = None
        super().forget()

    def check_order(self) -> None:
        """Raise StaleTailInputs if the order changes in which norms are added up."""
        if (
            dtypes_in_order(self.grads, self.tail_inputs["places"])
            != self.tail_inputs["order"]
        ):
            raise StaleTailInputs


def _checked_by(
    owner: weakref.ref[_LinkedGraph],
) -> Callable[[Binding, list[Any], int], None]:
    """Return a check that follows all changes that leave the order of dtypes."""

    def changed(bound: Binding, metadata: list[Any], found: int) -> None:
        graph = owner()
        assert graph is not None
        graph.check_order()

    return changed
