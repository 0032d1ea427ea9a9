"""Where the tensors of all lanes come from, in a call for their models."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import is_, itemgetter
from typing import Any, Protocol

from ..runtime.guards.given import Given
from ..runtime.guards.lanes import LaneGuard, Meeting
from ..runtime.guards.tensors import TensorGuard, address
from ..runtime.source import GraphTensors
from ..runtime.step import CompiledStep
from ..shadow.lanes import Found
from .aside import NO_ASIDE, Aside, Compared, Tensors


class Call:
    """One call of an optimizer's step: what its graphs are told of it, and what they
    tell of themselves.

    `found`: the tensors of lanes. `given`: has gradients that lanes are to have.
    `aside`: what stands around the step.
    `entered`: has a graph begun to run?
    `quiet`: was nothing compiled or rehearsed so far? `surveyed`: have all lanes been
    looked at closely?
    """

    def __init__(
        self,
        optimizer: Any,
        found: Found,
        quiet: bool = True,
        given: Given | None = None,
        aside: Aside = NO_ASIDE,
    ) -> None:
        self.optimizer = optimizer
        self.found = found
        self.aside = aside
        self.given = given
        self.entered = False
        self.quiet = quiet
        self.surveyed = False

    def put_gradients(self) -> None:
        """Let lanes have their gradients, before anything in Python looks at those."""
        if self.given is not None:
            self.given.put()


class Finds(Protocol):
    """Who finds the tensors of lanes, call by call."""

    @property
    def call(self) -> Call:
        """The call that is under way."""


class LaneTensors:
    """The tensors of all lanes, for a graph of their models.

    `owner.call.found` has the lanes', in the call that is under way. `order`: the
    places of the step's tensors, counted through those of the graph, of which only
    what belongs to no lane is taken, then what stands beside lanes, then the lanes'.
    `graph`: how many the graph has; `beside`: how many stand beside lanes. `gradients`:
    where in the step those of lanes are, in the order of the lanes; None: not there.
    """

    def __init__(
        self,
        models: GraphTensors,
        order: Sequence[int],
        graph: int,
        beside: int,
        owner: Finds,
        gradients: Sequence[int | None] = (),
    ) -> None:
        self.gm = models.gm
        self.models = models.tensors
        self.order = order
        self.graph = graph
        self.n = graph + beside
        self.owner = owner
        known = [place for place in gradients if place is not None]
        self.gradients = array("q", known if len(known) == len(gradients) else ())
        self._met: tuple[LaneGuard, Meeting] | None = None
        # what stands beside lanes, as it is compared with what they hold; kept, for
        # the guard knows it by address
        self._columns: Sequence[Tensors] = ()
        self._others = 0, 0
        common = [place for place in order if place < graph]
        self._n_common = len(common)
        #: what belongs to no lane, in order
        self._pick: Callable[[list[Any]], list[Any]] | None = None
        if common:
            # of one place it gives no tuple
            pick = itemgetter(*common, common[0])
            self._pick = lambda every: list(pick(every)[:-1])

    def look(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """See TensorSource. Those of lanes have been compared when they were found,
        where this is the step whose tensors were compared then.
        """
        found, columns = self.owner.call.found, self.owner.call.aside.columns
        same = len(columns) == len(self._columns) and all(
            map(is_, columns, self._columns)
        )
        if found.compared is guard and self._met is not None and same:
            found.compared = None
            common = self._pick(self.models(args)) if self._pick else []
            seen = guard.look_at_others(common, *self._others)
            return seen, (common, found.grads)
        given = self._all(args)
        seen = guard.look({}, {}, given)
        self._columns = columns
        if found.guard is not None:
            if self._met is None or self._met[0] is not found.guard:
                self._met = found.guard, self._meeting(found)
                self._others = address(self._met[1].others), self._n_common
            found.guard.compare_with(guard, self._met[1])
        return seen, given

    def _meeting(self, found: Found) -> Meeting:
        """Where the tensors of lanes are in the step."""
        gradients = {self.n + place: lane for place, lane in found.late}
        of_lane = array("q", [-1] * len(found.grads))
        others, held = array("q"), array("q")
        for i, place in enumerate(self.order):
            if place < self.graph:
                others.append(i)
            elif place in gradients:
                of_lane[gradients[place]] = i
            elif held and held[-1] == i:
                held[-1] = i + 1
            else:
                held.extend((i, i + 1))
        return Meeting(of_lane, held, others)

    def _others_of(self, args: Sequence[Any]) -> list[Any]:
        """All but the lanes' own."""
        if self.n == self.graph:
            return self.models(args)
        return self.models(args) + self.owner.call.aside.beside

    def _all(self, args: Sequence[Any]) -> tuple[Any, ...]:
        every = self._others_of(args) + self.owner.call.found.tensors()
        return tuple([every[place] for place in self.order])

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """See TensorSource."""
        return list(self._all(args))

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """See TensorSource."""
        place = self.order[i]
        if place < self.n:
            return self._others_of(args)[place]
        return self.owner.call.found.tensor(place - self.n)


def compared_by(step: CompiledStep) -> Compared | None:
    """The gradients of lanes that a step which is ready has compared; None where none
    of its guards has.
    """
    bound, source = step.program.bound, step.source
    if bound is None or bound.guard is None or not isinstance(source, LaneTensors):
        return None
    return Compared(bound.guard, source.gradients)
