"""Find the tensors of a call, in the order in which a step takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

from torch.fx import GraphModule

from .guards.tensors import TensorGuard


class TensorSource(Protocol):
    """Interface of a source of a call's tensors."""

    gm: GraphModule

    def compare(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """Compare them with a guard. Return its result, and a reference to keep."""

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """Return all of them."""

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """Return one of them."""


class OneByOne:
    """Tensors of a call by their index. Each is found when it is read."""

    def __init__(self, source: TensorSource, args: Sequence[Any]) -> None:
        self.source = source
        self.args = args

    def __getitem__(self, i: int) -> Any:
        return self.source.tensor(self.args, i)


class GraphTensors:
    """Tensors of Dynamo's graph: its buffers, its parameters, then the arguments at
    `positions`.

    Dynamo registers buffers and parameters on the GraphModule and drops them when the
    optimizer dies. Nothing else may keep them alive, so each call reads them anew.
    """

    def __init__(self, gm: GraphModule, positions: Sequence[int]) -> None:
        self.gm = gm
        self.positions = positions
        #: the positions as a slice, where they are consecutive
        self._row: slice | None = None
        if positions and [*positions] == [*range(positions[0], positions[-1] + 1)]:
            self._row = slice(positions[0], positions[-1] + 1)

    def _given(self, args: Sequence[Any]) -> Sequence[Any]:
        """Return the tensors among the arguments."""
        if self._row is not None:
            return args[self._row]
        return [*map(args.__getitem__, self.positions)]

    def compare(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """See TensorSource."""
        tensors = tuple(self._given(args))
        return guard.compare(self.gm._buffers, self.gm._parameters, tensors), tensors

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """See TensorSource."""
        gm = self.gm
        tensors = [*gm._buffers.values(), *gm._parameters.values()]
        return [*tensors, *self._given(args)]

    def picks(self, places: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
        """Return a function of the arguments that returns the tensors at these places.
        There is at least one place.
        """
        n = len(self.gm._buffers) + len(self.gm._parameters)
        given = min(places) >= n
        at = [self.positions[i - n] for i in places] if given else [*places]
        # itemgetter of one place returns no tuple
        pick = itemgetter(*at, at[0])
        if given:
            return lambda args: list(pick(args)[:-1])
        return lambda args: list(pick(self.tensors(args))[:-1])

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """See TensorSource."""
        k = i - len(self.gm._buffers) - len(self.gm._parameters)
        return self.tensors(args)[i] if k < 0 else args[self.positions[k]]
