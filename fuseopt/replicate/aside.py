"""What one call of a step has beside the optimizer, for what stands around the step."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..errors import FuseoptError
from ..runtime.commit import Launches
from ..runtime.guards.tensors import TensorGuard
from ..runtime.step import CompiledStep
from ..shadow.lanes import Lanes

Tensors = list[torch.Tensor]


class Other(FuseoptError):
    """A call is not like the last one; nothing was done, and it is to be made anew."""


class Compared(NamedTuple):
    """Gradients that a step's guard has compared: where they are among its tensors, in
    the order of the lanes.
    """

    guard: TensorGuard
    places: array[int]


@dataclass
class Aside:
    """What one call has for this, but for the lanes' own tensors.

    `columns`: tensors beside the parameters, in each column one for each lane; a list
    that was given once holds the same ever after. `shared`: tensors and floats that are
    the same for all lanes. `flag`: is the step skipped? It is one of `shared`; None
    where none may be. `ahead`: given the step when it is ready, gives the launches that
    come before its own; it may raise Other. `again`: lanes are to be these,
    else Other is raised.
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
            self.beside = [t for own in self.columns for t in own]


NO_ASIDE = Aside()
