"""Where the tensors of all lanes come from, in a call for the leading ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

from ..runtime.guards.probe import Probe
from ..runtime.source import GraphTensors, Places
from ..shadow.lanes import Found


class Call:
    """One call of an optimizer's step: what its graphs are told of it, and what they
    tell of themselves.

    `found`: the tensors of the lanes that are led. `entered`: has a graph begun to run?
    `quiet`: was nothing compiled or rehearsed so far?
    """

    def __init__(self, optimizer: Any, found: Found) -> None:
        self.optimizer = optimizer
        self.found = found
        self.entered = False
        self.quiet = True


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
        self._pick: Callable[[list[Any]], tuple[Any, ...]] = itemgetter(*order)

    def look(self, guard: Probe, args: Sequence[Any]) -> tuple[int, Any]:
        """See TensorSource."""
        found = self.owner.call.found
        if found.watch is None:
            given = self.places(args)
            return guard.look(*given), given
        leading = self.leading(args)
        if guard.holder is found.watch:
            late = [*leading, *found.grads]
            return guard.look_again(late), late
        given = self.places(args)
        seen = guard.look(*given)
        # all but the gradients are the watch's, which keeps them
        n = len(leading)
        at = {n + place: n + k for place, k in found.late}
        at |= {k: k for k in range(n)}
        known = [(i, at[s]) for i, s in enumerate(self.order) if s in at]
        guard.hold(found.watch, known, n + len(found.grads))
        return seen, given

    def places(self, args: Sequence[Any]) -> Places:
        """The tensors of all lanes."""
        return {}, {}, self._pick(self.leading(args) + self.owner.call.found.tensors())

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """See TensorSource."""
        return list(self.places(args)[2])

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """See TensorSource."""
        leading, place = self.leading(args), self.order[i]
        return leading[place] if place < len(leading) else self.tensors(args)[i]
