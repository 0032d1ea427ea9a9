"""Where the tensors of all lanes come from, in a call for the leading ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

from ..runtime.guards.lanes import LaneGuard, Meeting
from ..runtime.guards.tensors import TensorGuard, address
from ..runtime.source import GraphTensors
from ..shadow.lanes import Found


class Call:
    """One call of an optimizer's step: what its graphs are told of it, and what they
    tell of themselves.

    `found`: the tensors of the lanes that are led. `entered`: has a graph begun to run?
    `quiet`: was nothing compiled or rehearsed so far?
    """

    def __init__(self, optimizer: Any, found: Found, quiet: bool = True) -> None:
        self.optimizer = optimizer
        self.found = found
        self.entered = False
        self.quiet = quiet


class Finds(Protocol):
    """Who finds the tensors of lanes, call by call."""

    @property
    def call(self) -> Call:
        """The call that is under way."""


class LaneTensors:
    """The tensors of a graph of the leading lanes, and of all lanes that these lead.

    `owner.call.found` has the latter, in the call that is under way. `order`: the
    places of the step's tensors, counted through the leading ones, then the led ones.
    """

    def __init__(
        self, leading: GraphTensors, order: Sequence[int], owner: Finds
    ) -> None:
        self.gm = leading.gm
        self.leading = leading.tensors
        self.order = order
        self.owner = owner
        self._met: tuple[LaneGuard, Meeting] | None = None
        self._others = 0, 0
        self._pick: Callable[[list[Any]], tuple[Any, ...]] = itemgetter(*order)

    def look(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """See TensorSource. Led lanes have been compared when they were found, where
        this is the step whose tensors were compared then.
        """
        found = self.owner.call.found
        if found.compared is guard and self._met is not None:
            found.compared = None
            leading = self.leading(args)
            seen = guard.look_at_others(leading, *self._others)
            return seen, (leading, found.grads)
        given = self._all(args)
        seen = guard.look({}, {}, given)
        if found.guard is not None:
            if self._met is None or self._met[0] is not found.guard:
                n = len(self.leading(args))
                self._met = found.guard, self._meeting(found, n)
                self._others = address(self._met[1].others), n
            found.guard.compare_with(guard, self._met[1])
        return seen, given

    def _meeting(self, found: Found, n: int) -> Meeting:
        """Where the tensors of led lanes are in the step; `n`: how many are before."""
        gradients = {n + place: lane for place, lane in found.late}
        of_lane, others = array("q", [-1] * len(found.grads)), array("q", [0] * n)
        held = array("q")
        for i, place in enumerate(self.order):
            if place < n:
                others[place] = i
            elif place in gradients:
                of_lane[gradients[place]] = i
            elif held and held[-1] == i:
                held[-1] = i + 1
            else:
                held.extend((i, i + 1))
        return Meeting(of_lane, held, others)

    def _all(self, args: Sequence[Any]) -> tuple[Any, ...]:
        return self._pick(self.leading(args) + self.owner.call.found.tensors())

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """See TensorSource."""
        return list(self._all(args))

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """See TensorSource."""
        leading, place = self.leading(args), self.order[i]
        return leading[place] if place < len(leading) else self.tensors(args)[i]
