"""Events of a run: each happens to both optimizers before a step."""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from .compare import parameters
from .subject import Subject, into_training

RATES = "rates moved"
MISSING = "gradients missing"
RESUMED = "state saved and loaded"
#: Events besides the fresh gradients of each step.
EVENTS = (RATES, MISSING, RESUMED)
#: The least number of steps that holds all events, with steps after each.
LEAST = 6


@dataclass(frozen=True)
class Course:
    """The number of steps of a run, and the EVENTS that happen before some of them."""

    steps: int
    events: tuple[str, ...] = EVENTS

    def before(self, subject: Subject, optimizer: Optimizer, number: int) -> Optimizer:
        """Prepare an optimizer for a step.

        Returns the optimizer that runs the step: a new one if a checkpoint was loaded.
        """
        if RESUMED in self.events and number == self.steps // 2:
            optimizer = resumed(subject, optimizer)
        if RATES in self.events and number >= 2:
            _move_rates(optimizer, 1 - number / (2 * self.steps))
        third = number % 3 if self.lacks(number) else -1
        give_gradients(optimizer, number, third)
        return optimizer

    def lacks(self, number: int) -> bool:
        """Do some parameters have no gradient in this step?"""
        begin = self.steps // 2 + 1
        return MISSING in self.events and begin <= number < begin + 2


def give_gradients(optimizer: Optimizer, number: int, third: int = -1) -> None:
    """Assign fresh gradients, which depend only on `number`.

    From `third` on, every third parameter gets no gradient; `third` = -1 gives all one.
    """
    drawn = torch.Generator().manual_seed(1000 + number)
    scale = 1e-3 if number % 4 == 3 else 1.0
    every = parameters(optimizer)
    for i, p in enumerate(every):
        kind = torch.float64 if p.dtype == torch.float64 else torch.float32
        grad = scale * torch.randn(p.shape, generator=drawn, dtype=kind)
        if p.is_complex():
            grad = torch.complex(grad, torch.randn(p.shape, generator=drawn))
        # one or two parameters always have gradients: a step without any would do
        # nothing
        lacks = len(every) > 2 and third >= 0 and i % 3 == third
        p.grad = None if lacks else grad.to(p.device, p.dtype)


def seed(number: int) -> None:
    """Seed all random number generators, so that both optimizers draw alike."""
    torch.manual_seed(2000 + number)
    random.seed(2000 + number)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(2000 + number)


def rates(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield each group that has a learning rate, and the rate."""
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor) or (
            isinstance(rate, float) and not isinstance(rate, bool)
        ):
            yield group, rate


def _move_rates(optimizer: Optimizer, factor: float) -> None:
    """Multiply each rate by a factor, as a scheduler would: from the present value."""
    for group, rate in rates(optimizer):
        if isinstance(rate, torch.Tensor):
            rate.mul_(factor)
        else:
            group["lr"] = rate * factor


def resumed(subject: Subject, optimizer: Optimizer) -> Optimizer:
    """Return a new optimizer with the parameters and the state of another.

    They pass through a file that torch.save writes.
    """
    file = io.BytesIO()
    tensors = [p.detach() for p in parameters(optimizer)]
    torch.save((optimizer.state_dict(), tensors), file)
    file.seek(0)
    state, contents = torch.load(file, weights_only=False)
    made = subject.optimizer()
    with torch.no_grad():
        for p, content in zip(parameters(made), contents, strict=True):
            p.copy_(content)
    made.load_state_dict(state)
    into_training(made)
    return made
