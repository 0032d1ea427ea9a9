"""Where the tensors of a call come from, in the order in which a step has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch.fx import GraphModule

from .guards.tensors import TensorGuard


class TensorSource(Protocol):
    """What finds the tensors of a call, without a look at each of them."""

    gm: GraphModule

    def look(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """What a guard says of them; and what keeps them alive."""

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """All of them."""

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """One of them."""


class GraphTensors:
    """The tensors of Dynamo's graph: its buffers, its parameters, then those among the
    arguments, which stand there at `positions`.

    Dynamo registers a graph's own on the GraphModule and drops them from there when the
    optimizer dies, so that nobody else may keep them alive.
    """

    def __init__(self, gm: GraphModule, positions: Sequence[int]) -> None:
        self.gm = gm
        self.positions = positions
        #: those of the tensors where they stand in a row
        self._row: slice | None = None
        if positions and [*positions] == [*range(positions[0], positions[-1] + 1)]:
            self._row = slice(positions[0], positions[-1] + 1)

    def _given(self, args: Sequence[Any]) -> Sequence[Any]:
        """The tensors among the arguments."""
        if self._row is not None:
            return args[self._row]
        return [args[i] for i in self.positions]

    def look(self, guard: TensorGuard, args: Sequence[Any]) -> tuple[int, Any]:
        """See TensorSource."""
        kept = tuple(self._given(args))
        return guard.look(self.gm._buffers, self.gm._parameters, kept), kept

    def tensors(self, args: Sequence[Any]) -> list[Any]:
        """See TensorSource."""
        gm = self.gm
        tensors = [*gm._buffers.values(), *gm._parameters.values()]
        return [*tensors, *self._given(args)]

    def tensor(self, args: Sequence[Any], i: int) -> Any:
        """See TensorSource."""
        k = i - len(self.gm._buffers) - len(self.gm._parameters)
        return self.tensors(args)[i] if k < 0 else args[self.positions[k]]
