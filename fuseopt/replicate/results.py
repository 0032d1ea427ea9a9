"""The results of an extended step: stand-ins for the models, tensors for each lane.

Dynamo's code stores what a graph returns in the state of the models. A token stands
there for a tensor that the step creates for each lane, and an OwnInt or OwnFloat, which
has an index, for a number of each lane.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..capture.results import Known, Leaf, Returned, rebuild
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..inputs.keys import LanesDiffer
from ..runtime.memory import Memory
from .extend import COMMON, Extended


class OwnInt(int):
    """Stands for an integer of each lane. `index`: into the numbers of the models."""

    index: int


class OwnFloat(float):
    """The same of a float."""

    index: int


class Results:
    """The results of an extended step. The models' step returned `captured.result`.

    `result`: what the extended step returns, with stand-ins. `tensors`: those of the
    models, by source; `members`: the lanes of each model. `numbers`: of the models.
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
        #: by model, the numbers of the lanes that take part
        self.at: Sequence[Sequence[int]] = [range(len(x)) for x in members]
        self.numbers = captured.graph.numbers
        self._buffers = captured.graph.buffers
        self._tensors = tensors
        #: by identity of tokens: what they stand for, of the model
        self._tokens: dict[int, Returned] = {}
        #: the tensors that the last call created, by token and by lane
        self.made: dict[int, dict[int, torch.Tensor]] = {}
        self.result = rebuild(captured.result, self._instead)

    def _instead(self, x: Leaf) -> Any:
        if isinstance(x, Returned) and self.extended.owners[x.buffer] != COMMON:
            buffer = self._buffers[x.buffer]
            if buffer.kind in ("static", "arg"):
                return Known(self._tensors[buffer.source])
            if buffer.kind != "temp" or x.complex:
                raise LanesDiffer("it keeps another view of a tensor of a lane")
            # a float64 without dimensions may be read at once, as a number
            number = buffer.dtype == "f64" and not buffer.shape
            nothing = torch.full((), torch.nan, dtype=torch.float64)
            token = nothing if number else torch.empty(0)
            self._tokens[id(token)] = x
            return Known(token)
        if isinstance(x, NumberRef) and self.extended.owners[x.buffer] != COMMON:
            raise LanesDiffer("it keeps a number computed from a tensor of a lane")
        if isinstance(x, Sym) and self.extended.number_owners[x.index] != COMMON:
            stand_in: Any = OwnFloat(torch.nan) if x.is_float else OwnInt(0)
            stand_in.index = x.index
            return Known(stand_in)
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
        """The number of each lane of a model; `numbers`: those of the call."""
        index, extended = stand_in.index, self.extended
        lanes = self.at[extended.number_owners[index]]
        return [numbers[extended.numbers[index, m]] for m in lanes]

    def clear(self) -> Mapping[int, dict[int, torch.Tensor]]:
        """Hand over the tensors that the last call created."""
        made, self.made = self.made, {}
        return made
