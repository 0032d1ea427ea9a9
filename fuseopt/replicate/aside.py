"""What one call of a step has beside the optimizer, for what stands around the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = list[torch.Tensor]


@dataclass
class Aside:
    """What one call has for this, but for the lanes' own tensors.

    `columns`: tensors beside the parameters, in each column one for each lane.
    `shared`: tensors and floats that are the same for all lanes. `flag`: is the step
    skipped? It is one of `shared`; None where none may be.
    """

    columns: Sequence[Tensors] = ()
    shared: Sequence[Any] = ()
    flag: torch.Tensor | None = None
    #: the columns, one behind the other
    beside: Tensors = field(init=False)

    def __post_init__(self) -> None:
        if len(self.columns) == 1:
            self.beside = self.columns[0]
        else:
            self.beside = [t for own in self.columns for t in own]


NO_ASIDE = Aside()
