"""What the step of models returns -> what stands for it, and what each lane is given.

Dynamo's code puts what a graph returns into the state of the models. There a token
stands for a tensor that the step makes for each lane, and a number that says which one
it is for a number of each lane's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..capture.results import Known, Leaf, Returned, rebuild
from ..capture.scalars.device import NumberRef
from ..capture.scalars.host import Sym
from ..capture.trace import Captured
from ..runtime.memory import Memory
from ..shadow.lanes import Unlike
from .extend import COMMON, Extended


class OwnInt(int):
    """An integer of each lane's own; `index`: which of the numbers of the models."""

    index: int


class OwnFloat(float):
    """The same of a float."""

    index: int


class Results:
    """What an extended step gives lanes. `models` returned `captured.result`.

    `result`: what it returns now. `tensors`: those of the models, by source;
    `members`: the lanes of each model.
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
        self._buffers = captured.graph.buffers
        self._tensors = tensors
        #: by identity of tokens: the buffer of the model
        self._tokens: dict[int, int] = {}
        #: what the last call made, by token and by lane
        self.made: dict[int, dict[int, torch.Tensor]] = {}
        self.result = rebuild(captured.result, self._instead)

    def _instead(self, x: Leaf) -> Any:
        if isinstance(x, Returned) and self.extended.owners[x.buffer] != COMMON:
            buffer = self._buffers[x.buffer]
            if buffer.kind in ("static", "arg"):
                return Known(self._tensors[buffer.source])
            if buffer.kind != "temp" or x.complex:
                raise Unlike("it keeps another view of a tensor of a lane")
            # a float64 without dimensions may be read at once, as a number
            number = buffer.dtype == "f64" and not buffer.shape
            nothing = torch.full((), torch.nan, dtype=torch.float64)
            token = nothing if number else torch.empty(0)
            self._tokens[id(token)] = x.buffer
            return Known(token)
        if isinstance(x, NumberRef) and self.extended.owners[x.buffer] != COMMON:
            raise Unlike("it keeps a number that was computed of a tensor of a lane")
        if isinstance(x, Sym) and self.extended.number_owners[x.index] != COMMON:
            own: Any = OwnFloat(torch.nan) if x.is_float else OwnInt(0)
            own.index = x.index
            return Known(own)
        return x

    def take(self, memory: Memory | None) -> None:
        """Take what a call has made for lanes."""
        self.made = {}
        for token, b in self._tokens.items():
            model = self.extended.owners[b]
            own = self.made[token] = {}
            for m, lane in enumerate(self.members[model]):
                assert memory is not None
                own[lane] = memory.tensor(self.extended.copies[b, m])

    def number(self, own: OwnInt | OwnFloat, m: int, numbers: Sequence[Any]) -> Any:
        """The number of lane m of a model; `numbers`: those of the call."""
        return numbers[self.extended.numbers[own.index, m]]

    def clear(self) -> Mapping[int, dict[int, torch.Tensor]]:
        """What the last call has made, which is nobody's then."""
        made, self.made = self.made, {}
        return made
