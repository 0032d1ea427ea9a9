"""What a training of tests/wild is given, and what it gives back.

A training is written once. `compile` is the one line that a user changes: for the run
in eager it returns the optimizer as it is, else it is `fuseopt.compile`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Takes an optimizer, and returns the same one.
Compile = Callable[[Any], Any]
#: So many steps does a training take, unless its file says otherwise.
STEPS = 20


@dataclass(frozen=True)
class Trained:
    """What a training leaves behind: tensors of models and averages, by name, and the
    optimizers in the order in which they were made.
    """

    tensors: Mapping[str, Tensor]
    optimizers: list[Optimizer]


#: A whole training.
Train = Callable[[Compile], Trained]
#: The same, saved half way into a folder, made anew and resumed from there.
Resume = Callable[[Compile, Path], Trained]


def seed_all(seed: int = 0) -> None:
    """Let every generator of numbers begin anew."""
    import numpy

    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def tensors_of(*modules: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of all that modules hold, by their place and name."""
    return {
        f"{place}.{name}": value.detach().clone()
        for place, module in enumerate(modules)
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }


def state_of(optimizers: Iterable[Optimizer]) -> dict[str, object]:
    """All that optimizers hold: options of groups, and state by parameter and name."""
    held: dict[str, object] = {}
    for place, optimizer in enumerate(optimizers):
        number = 0
        for g, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name != "params":
                    held[f"{place}: {name} of group {g}"] = value
            for p in group["params"]:
                for name, value in optimizer.state.get(p, {}).items():
                    held[f"{place}: {name} of parameter {number}"] = value
                number += 1
    return held
