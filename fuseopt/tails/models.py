"""Averages of models: torch.optim.swa_utils.AveragedModel, and the model it is of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel, get_swa_avg_fn, get_swa_multi_avg_fn

from .. import compat
from .arguments import check_beside

Tensors = list[torch.Tensor]


class Updated:
    """One update of an averaged model, as Dynamo is given it.

    `groups`: (averages, what they are of) of one device and dtype. `follows`: what only
    follows the model, and what of. `number`: how often it was updated. `first`: is this
    the first time, which copies?
    """

    groups: list[tuple[Tensors, Tensors]]
    follows: list[tuple[Tensors, Tensors]]
    function: Callable[..., Any] | None
    single: Callable[..., Any] | None
    number: torch.Tensor
    first: bool

    def tensors(self) -> Iterable[torch.Tensor]:
        """All that it writes."""
        yield self.number
        for own, _ in (*self.groups, *self.follows):
            yield from own


class Averaged:
    """An AveragedModel beside its model. Raises ValueError where they do not fit."""

    def __init__(self, averaged: AveragedModel, model: torch.nn.Module) -> None:
        self.averaged = averaged
        self.model = model
        #: the number of updates that was not zero, and its version
        self._known: tuple[Any, int] = None, -1
        self._seen: list[int] = []
        self._groups: list[tuple[Tensors, Tensors]] = []
        self._follows: list[tuple[Tensors, Tensors]] = []
        self._look()

    def update(self) -> Updated:
        """What is to be done in a call. Waits for the device where somebody else has
        set the number of updates.
        """
        self._look()
        number = self.averaged.n_averaged
        known, version = self._known
        made = Updated()
        made.groups, made.follows = self._groups, self._follows
        made.function, made.single = self.averaged.multi_avg_fn, self.averaged.avg_fn
        if made.function is None and made.single is None:
            lists = all(
                own[0].device.type in compat.devices_with_lists()
                for own, _ in self._groups
            )
            make: Any = get_swa_multi_avg_fn if lists else get_swa_avg_fn
            if lists:
                made.function = make()
            else:
                made.single = make()
        made.number = number
        same = known is number and version == number._version
        made.first = not same and int(number) == 0
        return made

    def updated(self) -> None:
        """It was done: the number of updates is not zero."""
        number = self.averaged.n_averaged
        self._known = number, number._version

    def _look(self) -> None:
        averaged, model = self.averaged, self.model
        inner: Any = averaged.module
        own: Tensors = list(averaged.parameters())
        source: Tensors = list(model.parameters())
        follows: tuple[Tensors, Tensors] = list(inner.buffers()), list(model.buffers())
        if averaged.use_buffers:
            own, source = own + follows[0], source + follows[1]
            follows = [], []
        seen = [*map(id, chain(own, source, *follows))]
        if seen == self._seen:
            return
        check_beside("an averaged model", own, source, any_dtype=True)
        check_beside("an averaged model's buffers", *follows, any_dtype=True)
        groups: dict[Any, tuple[Tensors, Tensors]] = {}
        for a, p in zip(own, source, strict=True):
            key = a.device, a.dtype, p.dtype
            mine, theirs = groups.setdefault(key, ([], []))
            mine.append(a.detach())
            theirs.append(p.detach())
        self._groups = [*groups.values()]
        self._follows = [follows] if follows[0] else []
        self._seen = seen


def update(models: Iterable[Updated]) -> None:
    """What AveragedModel.update_parameters does; traced, and in eager."""
    for x in models:
        for own, source in x.groups:
            if x.first:
                torch._foreach_copy_(own, source)
            elif x.function is not None:
                x.function(own, source, x.number.to(own[0].device))
            elif x.single is not None:
                number = x.number.to(own[0].device)
                for a, p in zip(own, source, strict=True):
                    a.copy_(x.single(a, p, number))
        for own, source in x.follows:
            torch._foreach_copy_(own, source)
        x.number.add_(1)
