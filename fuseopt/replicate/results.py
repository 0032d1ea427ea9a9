"""Results of an extended step: stand-ins for the models, tensors for each lane.

Dynamo's code stores the results of a graph in the state of the models. A token there
replaces a tensor that the step creates for each lane. An OwnInt or OwnFloat, which has
an index, replaces a number of each lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..capture.results import ConstantResult, Leaf, Returned, rebuild
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..inputs.keys import LanesDiffer
from ..runtime.memory import Memory
from .extend import COMMON, Extended


class OwnInt(int):
    """A stand-in for an integer of each lane; `index`: in the models' numbers."""

    index: int


class OwnFloat(float):
    """A stand-in for a float of each lane."""

    index: int


class Results:
    """The results of an extended step. The models' step returned `captured.result`.

    `result`: the result of the extended step, with stand-ins. `tensors`: the models'
    tensors, by source. `members`: the lanes of each model. `numbers`: those of the
    models.
    """

    def __init__(
        self,
        captured: Captured,
        extended: Extended,
        tensors: Sequence[torch.Tensor],
        members: Sequence[Sequence[int]],
    ) -> None:
        self.extended = extended
        self.members = members
        #: by model, the indices of the lanes that take part
        self.at: Sequence[Sequence[int]] = [range(len(x)) for x in members]
        self.numbers = captured.graph.numbers
        #: by number of a model, the lanes of the last call and their numbers' places
        self._places: dict[int, tuple[Sequence[int], list[int]]] = {}
        self._buffers = captured.graph.buffers
        self._tensors = tensors
        #: by the id of a token, the result of the model that it replaces
        self._tokens: dict[int, Returned] = {}
        #: the tensors that the last call created, by token and by lane
        self.made: dict[int, dict[int, torch.Tensor]] = {}
        self.result = rebuild(captured.result, self._instead)

    def _instead(self, x: Leaf) -> Any:
        if isinstance(x, Returned) and self.extended.owners[x.buffer] != COMMON:
            buffer = self._buffers[x.buffer]
            if buffer.kind in ("static", "arg"):
                return ConstantResult(self._tensors[buffer.source])
            if buffer.kind != "temp" or x.complex:
                raise LanesDiffer("it keeps another view of a tensor of a lane")
            # code may read a float64 without dimensions at once, as a number
            number = buffer.dtype == "f64" and not buffer.shape
            nothing = torch.full((), torch.nan, dtype=torch.float64)
            token = nothing if number else torch.empty(0)
            self._tokens[id(token)] = x
            return ConstantResult(token)
        if isinstance(x, NumberRef) and self.extended.owners[x.buffer] != COMMON:
            raise LanesDiffer("it keeps a number computed from a tensor of a lane")
        if isinstance(x, Sym) and self.extended.number_owners[x.index] != COMMON:
            stand_in: Any = OwnFloat(torch.nan) if x.is_float else OwnInt(0)
            stand_in.index = x.index
            return ConstantResult(stand_in)
        return x

    def take(self, memory: Memory | None) -> None:
        """Take the tensors that a call created for lanes from its memory."""
        self.made = {}
        for token, x in self._tokens.items():
            model = self.extended.owners[x.buffer]
            by_lane = self.made[token] = {}
            for m in self.at[model]:
                assert memory is not None
                t = memory.tensor(self.extended.copies[x.buffer, m])
                by_lane[self.members[model][m]] = t.detach() if x.again else t

    def of_lanes(
        self, stand_in: OwnInt | OwnFloat, numbers: Sequence[Any]
    ) -> list[Any]:
        """Return the number of each lane of a model; `numbers`: those of the call."""
        index, extended = stand_in.index, self.extended
        lanes = self.at[extended.number_owners[index]]
        known = self._places.get(index)
        if known is None or known[0] is not lanes:
            places = [extended.numbers[index, m] for m in lanes]
            known = self._places[index] = lanes, places
        return [*map(numbers.__getitem__, known[1])]

    def clear(self) -> Mapping[int, dict[int, torch.Tensor]]:
        """Return the tensors that the last call created, and release them."""
        made, self.made = self.made, {}
        return made
