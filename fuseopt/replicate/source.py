"""Find the tensors of all lanes in a call of the graph of their models."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, Protocol

import torch

from ..inputs.lane_guard import GuardIndexMap, LaneGuard
from ..inputs.lane_matcher import CallTensors
from ..inputs.pending_gradients import PendingGradients
from ..runtime.guards.tensors import TensorGuard, address
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from .tail_arguments import NO_TAIL_ARGUMENTS, ComparedGradients, TailArguments, Tensors

NOTHING = CallTensors([])


class StepCall:
    """The state of one call of an optimizer's step, shared with its graphs.

    `found`: the tensors of lanes. `given`: gradients for the lanes. `tail_arguments`:
    arguments for the calls around the step. `entered`: True once a graph began to run.
    `compiled_nothing`: True until the call compiles or rehearses. `surveyed`: True if
    this call read the metadata of all lanes.
    """

    entered = surveyed = False

    def __init__(
        self,
        optimizer: Any,
        found: CallTensors,
        compiled_nothing: bool = True,
        given: PendingGradients | None = None,
        tail_arguments: TailArguments = NO_TAIL_ARGUMENTS,
    ) -> None:
        self.optimizer, self.found, self.tail_arguments = (
            optimizer,
            found,
            tail_arguments,
        )
        self.given, self.compiled_nothing = given, compiled_nothing

    def put_gradients(self) -> None:
        """Assign `given` gradients to parameters, before Python code reads them."""
        if self.given is not None:
            self.given.put()


class CallHolder(Protocol):
    """An object with the current call, which has the tensors of lanes."""

    @property
    def call(self) -> StepCall:
        """The current call."""


class LaneTensors:
    """The tensors of all lanes, for a graph of their models.

    `order`: the step's tensors as indices into one sequence. It has the graph's tensors
    (only those of no lane are used), those beside lanes (`call.aside`), those of lanes
    (`call.found`), and stand-ins. `places`: as in Program. `graph`: the number of the
    graph's tensors; `beside`: the number of those beside lanes. Call `turn_to` with the
    lanes before the first call.
    """

    def __init__(
        self,
        models: GraphTensors,
        places: Sequence[Any],
        graph: int,
        beside: int,
        owner: CallHolder,
    ) -> None:
        self.gm = models.gm
        self.models = models.tensors
        self.graph = graph
        self.n = graph + beside
        self.owner = owner
        self.order: Sequence[int] = ()
        self.stand_ins: list[torch.Tensor] = []
        #: For each of the step's tensors, the replacement where a lane's gradient is
        #: None. `_make` makes these when a gradient is missing for the first time.
        self.instead: Sequence[torch.Tensor | None] = ()
        self._make: Callable[[], Sequence[torch.Tensor | None]] | None = None
        self.gradients = array("q")
        self._met: tuple[LaneGuard, GuardIndexMap] | None = None
        # the columns that the guard compared; kept alive, as it has their addresses
        self._columns: Sequence[Tensors] = ()
        #: the address of the indices of tensors of no lane, and their number
        self.others = 0, 0
        common = [x for x in places if isinstance(x, int) and x < graph]
        self._n_common = len(common)
        #: picks the tensors of no lane from the arguments, in order
        self.pick = models.picks(common) if common else None

    def turn_to(
        self,
        order: Sequence[int],
        stand_ins: Sequence[torch.Tensor],
        gradients: Sequence[int | None],
        instead: Callable[[], Sequence[torch.Tensor | None]] | None = None,
    ) -> None:
        """Find the tensors of other lanes from now on.

        `stand_ins`: replacements for missing gradients; `order` has their indices after
        all others. `gradients`: the index in the step of each lane's gradient, in the
        order of the lanes, or None if the step does not take it. `instead`: for lanes
        found by their home, makes the replacement of each of the step's tensors for a
        gradient that is None.
        """
        if order is self.order:
            return
        self.order, self.stand_ins = order, [*stand_ins]
        self.instead, self._make = (), instead
        places = [place for place in gradients if place is not None]
        self.gradients = array("q", places if len(places) == len(gradients) else ())
        met, self._met = self._met, None
        if met is not None:
            met[0].compare_no_more()

    def compare(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """Compare the tensors of a call; see TensorSource.

        If the pass that found the lanes' tensors compared them for this step's guard,
        only the other tensors are left.
        """
        found, columns = self.owner.call.found, self.owner.call.tail_arguments.columns
        if self._make is not None:
            self._stand_in(found)
        same = len(columns) == len(self._columns) and all(
            map(is_, columns, self._columns)
        )
        if found.compared is guard and self._met is not None and same:
            found.compared = None
            common = self.pick(args) if self.pick else []
            verdict = guard.compare_others(common, *self.others)
            return verdict, (common, found.grads)
        tensors = self._all(args)
        verdict = guard.compare({}, {}, tensors)
        self._columns = columns
        if found.guard is not None:
            if self._met is None or self._met[0] is not found.guard:
                self._met = found.guard, self._meeting(found)
                self.others = address(self._met[1].others), self._n_common
            found.guard.compare_with(guard, self._met[1])
        return verdict, tensors

    def _meeting(self, found: CallTensors) -> GuardIndexMap:
        """Return the indices of lanes' tensors in the step.

        Stand-ins are among the `held` tensors: they stay in place while this keeps
        them.
        """
        gradients = {self.n + place: lane for place, lane in found.late}
        of_lane = array("q", [-1] * len(found.grads))
        stand_ins: list[Any] = [None] * len(found.grads)
        others, ranges = array("q"), array("q")
        for i, place in enumerate(self.order):
            if place < self.graph:
                others.append(i)
            elif place in gradients:
                of_lane[gradients[place]] = i
                if self.instead:
                    stand_ins[gradients[place]] = self.instead[i]
            elif ranges and ranges[-1] == i:
                ranges[-1] = i + 1
            else:
                ranges.extend((i, i + 1))
        return GuardIndexMap(of_lane, ranges, others, stand_ins)

    def _stand_in(self, found: CallTensors) -> None:
        """Make the stand-ins if a gradient is missing for the first time."""
        if self._make is not None and 0 in found.present:
            self.instead, self._make = self._make(), None
            met, self._met, found.compared = self._met, None, None
            if met is not None:
                met[0].compare_no_more()

    def _others_of(self, args: Sequence[Any]) -> list[Any]:
        """Return the graph's tensors, then those beside lanes."""
        if self.n == self.graph:
            return self.models(args)
        return self.models(args) + self.owner.call.tail_arguments.beside

    def _all(self, args: Sequence[Any]) -> tuple[Any, ...]:
        self._stand_in(self.owner.call.found)
        found = self.owner.call.found.tensors()
        every = [*self._others_of(args), *found, *self.stand_ins]
        tensors = [every[place] for place in self.order]
        if self.instead and 0 in self.owner.call.found.present:
            pairs = zip(tensors, self.instead, strict=True)
            tensors = [other if t is None else t for t, other in pairs]
        return tuple(tensors)

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """See TensorSource."""
        return list(self._all(args))

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """See TensorSource."""
        place = self.order[i]
        if place < self.n:
            return self._others_of(args)[place]
        if self.stand_ins or self.instead:
            return self._all(args)[i]
        return self.owner.call.found.tensor(place - self.n)


def compared_by(step: CompiledStep) -> ComparedGradients | None:
    """Return the gradients of lanes that the guard of a prepared step has compared.

    None without a guard.
    """
    bound, source = step.program.bound, step.source
    if bound is None or bound.guard is None or not isinstance(source, LaneTensors):
        return None
    return ComparedGradients(bound.guard, source.gradients)
