"""What is verified: a function or a class that makes an optimizer, again and again."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import FuseoptError
from .compare import parameters

#: Shapes of the parameters that a class is given: the first of these that it takes.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    # without a dimension, empty, one element, odd, several dimensions, more than a
    # vector of the processor, more than a chunk of eager's loops
    "awkward": ((17, 5), (9,), (), (0, 3), (1,), (4, 3, 2, 2), (12, 8), (181, 193)),
    "usual": ((17, 5), (9,), (1,), (4, 3, 2, 2), (12, 8), (181, 193)),
    "matrices": ((17, 5), (12, 8), (8, 12), (61, 33)),
}


class NotRepeatable(FuseoptError):
    """The subject makes no optimizer, or another one at each call."""


@dataclass(frozen=True)
class Subject:
    """Makes the same optimizer as often as it is asked to.

    `make`: takes parameters, and gives an optimizer; or takes nothing, and gives one
    with parameters of its own. `options`: more that it is given by name. `dtype` and
    `device` are of the parameters that `make` is given.
    """

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    shapes: Sequence[tuple[int, ...]] = SHAPES["awkward"]

    @property
    def takes_parameters(self) -> bool:
        """Does `make` have an argument without a default?"""
        try:
            known = inspect.signature(self.make).parameters.values()
        except (TypeError, ValueError):
            return isinstance(self.make, type)
        by_place = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        return any(x.kind in by_place and x.default is x.empty for x in known)

    def optimizer(self) -> Optimizer:
        """A new optimizer, ready for a step. Raises NotRepeatable, and what `make`
        raises.
        """
        torch.manual_seed(0)
        random.seed(0)
        given = [self._parameters()] if self.takes_parameters else []
        made = self.make(*given, **self.options)
        if not isinstance(made, Optimizer):
            raise NotRepeatable(
                f"{self.name} makes no optimizer, but a {type(made).__name__}: name a "
                "class of optimizers, or a function that returns one"
            )
        if not parameters(made):
            raise NotRepeatable(f"{self.name} makes an optimizer without parameters")
        into_training(made)
        return made

    def _parameters(self) -> list[Tensor]:
        drawn = torch.Generator().manual_seed(1)
        return [
            torch.nn.Parameter(
                torch.randn(shape, generator=drawn).to(self.device, self.dtype)
            )
            for shape in self.shapes
        ]


def into_training(optimizer: Optimizer) -> None:
    """Call the `train` of an optimizer that has a mode for training and another one."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()
