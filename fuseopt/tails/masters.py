"""Optimizers whose parameters have masters, as a tail steps them.

Such an optimizer (`fuseopt.offload`) holds another one, which steps the masters. A tail
steps that one. Within a call the groups have masters in place of parameters. Their
gradients are those of the parameters, widened to float32, and have no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ..errors import UnsupportedInput
from .arguments import parameters_of
from .averages import Averages


class HasMasters(Protocol):
    """Optimizer with masters; `optimizer` is the one that steps these."""

    optimizer: Optimizer

    def check_tail(self) -> None:
        """Raise UnsupportedInput if a tail cannot step the masters."""

    def in_tail(self) -> AbstractContextManager[None]:
        """Have masters with their gradients in the groups within the context. At its
        end copy the stepped weights to the parameters.
        """

    def widened(self) -> AbstractContextManager[None]:
        """Give masters and their gradients memory and contents within the context, for
        a step in eager.
        """

    def own_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of 16 bits, in the order of the groups."""

    def stored_gradients(self) -> list[torch.Tensor]:
        """Return the gradients in memory, in the order of the groups."""


def masters_of(optimizer: Any) -> HasMasters | None:
    """Return the optimizer itself if its parameters have masters, else None."""
    found: HasMasters | None = None
    if hasattr(type(optimizer), HasMasters.in_tail.__name__):
        found = optimizer
    return found


def inner_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that steps masters; the optimizer itself without masters."""
    held = masters_of(optimizer)
    return optimizer if held is None else held.optimizer


def check_masters(
    held: Sequence[HasMasters], averages: Averages, has_norm_groups: bool
) -> None:
    """Raise UnsupportedInput for what a tail of masters cannot do."""
    for x in held:
        x.check_tail()
        of = f"a tail of {type(x).__name__}"
        if has_norm_groups:
            raise UnsupportedInput(
                f"norm_groups: {of} computes the norm of one process. Leave norm_groups"
                " out"
            )
        if averages.models or averages.objects or averages.names_sources:
            raise UnsupportedInput(
                f"ema: {of} averages masters of float32, and no model of 16 bits. Give "
                "pairs (averages, decay), with averages in the order of the parameters"
            )


def parameters_of_users(optimizers: Sequence[Optimizer]) -> list[torch.Tensor]:
    """Return the parameters that users see, in the order of the groups."""
    found: list[torch.Tensor] = []
    for optimizer in optimizers:
        held = masters_of(optimizer)
        found += parameters_of([optimizer]) if held is None else held.own_parameters()
    return found


@contextlib.contextmanager
def on_masters(held: Sequence[HasMasters]) -> Iterator[None]:
    """Have all masters in the groups within the context."""
    with contextlib.ExitStack() as stack:
        for x in held:
            stack.enter_context(x.in_tail())
        yield


@contextlib.contextmanager
def widened(held: Sequence[HasMasters]) -> Iterator[None]:
    """Give all masters and their gradients contents within the context."""
    with contextlib.ExitStack() as stack:
        for x in held:
            stack.enter_context(x.widened())
        yield
