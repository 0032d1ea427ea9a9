"""Arguments of one call for the calls around the step (see step_wrapper)."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import FuseoptError
from ..inputs.lanes import Lanes
from ..runtime.commit import Launches
from ..runtime.guards.tensors import TensorGuard
from ..runtime.step import CompiledStep

Tensors = list[torch.Tensor]


class StaleTailInputs(FuseoptError):
    """A call differs from the last one and needs preparation; nothing was done."""


class ComparedGradients(NamedTuple):
    """Gradients that a step's guard has compared.

    `places`: their indices among the guard's tensors, in the order of the lanes.
    """

    guard: TensorGuard
    places: array[int]


@dataclass
class TailArguments:
    """Arguments of one call for the calls around the step, besides lanes' tensors.

    `columns`: tensors beside the parameters, in each column one for each lane; do not
    change these lists later. `shared`: tensors and floats for all lanes. `flag`: one of
    `shared`, true to skip the step; None for a step that is never skipped.
    `launches_before(step)`: returns the launches before those of the step, which is
    ready; may raise StaleTailInputs. `again`: the lanes that the call must have; with
    other lanes it raises StaleTailInputs.
    """

    columns: Sequence[Tensors] = ()
    shared: Sequence[Any] = ()
    flag: torch.Tensor | None = None
    launches_before: Callable[[CompiledStep], Launches] | None = None
    again: Lanes | None = None
    #: the columns, one after the other
    beside: Tensors = field(init=False)

    def __post_init__(self) -> None:
        if len(self.columns) == 1:
            self.beside = self.columns[0]
        else:
            self.beside = [t for column in self.columns for t in column]


NO_TAIL_ARGUMENTS = TailArguments()
