"""The arguments of one call for what runs around the step (see around)."""

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
    """A call differs from the last one and must be prepared again. Nothing was done."""


class Compared(NamedTuple):
    """Gradients that a step's guard has compared. `places`: their indices among its
    tensors, in the order of the lanes.
    """

    guard: TensorGuard
    places: array[int]


@dataclass
class TailArguments:
    """The arguments of one call for what runs around the step, besides lanes' tensors.

    `columns`: tensors beside the parameters, in each column one for each lane; the
    lists must not be changed later. `shared`: tensors and floats for all lanes. `flag`:
    one of `shared`, true if the step is to be skipped; None if it never is.
    `ahead(step)` returns the launches that come before those of the step, which is
    ready; it may raise StaleTailInputs. `again`: the lanes that the call must have, or
    it raises StaleTailInputs.
    """

    columns: Sequence[Tensors] = ()
    shared: Sequence[Any] = ()
    flag: torch.Tensor | None = None
    ahead: Callable[[CompiledStep], Launches] | None = None
    again: Lanes | None = None
    #: the columns, one behind the other
    beside: Tensors = field(init=False)

    def __post_init__(self) -> None:
        if len(self.columns) == 1:
            self.beside = self.columns[0]
        else:
            self.beside = [t for column in self.columns for t in column]


NO_ASIDE = TailArguments()
