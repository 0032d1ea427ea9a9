"""Subject of a verification: a function or class that makes equal optimizers."""

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

#: Shapes of the parameters for a class: the first set with which its optimizer runs.
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    # no dimension, empty, one element, odd, several dimensions, more than a vector of
    # the processor, more than a chunk of eager's loops
    "awkward": ((17, 5), (9,), (), (0, 3), (1,), (4, 3, 2, 2), (12, 8), (181, 193)),
    "usual": ((17, 5), (9,), (1,), (4, 3, 2, 2), (12, 8), (181, 193)),
    "matrices": ((17, 5), (12, 8), (8, 12), (61, 33)),
}


class NotRepeatable(FuseoptError):
    """The subject makes no optimizer, or a different one at each call."""


@dataclass(frozen=True)
class Subject:
    """Makes the same optimizer at each call.

    `make`: takes parameters and returns an optimizer, or takes nothing and returns an
    optimizer with its own parameters. `options`: further keyword arguments of `make`.
    `dtype`, `device` and `shapes` describe the parameters that `make` takes.
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
        """Make a new optimizer that is ready for a step.

        Raises NotRepeatable, and any error of `make`.
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
    """Call the `train` method of an optimizer that has a training mode."""
    train = getattr(optimizer, "train", None)
    if callable(train):
        train()
