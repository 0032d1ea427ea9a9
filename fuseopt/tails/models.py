"""Averages of models: torch.optim.swa_utils.AveragedModel, and the model it is of."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
    get_swa_multi_avg_fn,
)

from .. import compat
from ..shadow.lanes import Unlike
from .arguments import check_beside

Tensors = list[torch.Tensor]


class Updated:
    """One update of an averaged model, as Dynamo is given it.

    `groups`: (averages, what they are of) of one device and dtype. `follows`: what only
    follows the model, and what of. `number`: how often it was updated. `first`: is this
    the first time, which copies? `pairs`: all that is averaged, with what it is of.
    `key`: equal for updates that do the same to each element; None where it is not
    known that they treat all alike.
    """

    groups: list[tuple[Tensors, Tensors]]
    follows: list[tuple[Tensors, Tensors]]
    function: Callable[..., Any] | None
    single: Callable[..., Any] | None
    number: torch.Tensor
    first: bool
    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    key: Any

    def alone(self) -> Updated:
        """What it does, without what it is done to."""
        made = Updated()
        made.function, made.single, made.first = self.function, self.single, self.first
        return made

    def beside(self, params: Sequence[torch.Tensor]) -> Tensors:
        """The averages of some parameters. Raises Unlike where one has none."""
        own = {id(p): a for a, p in self.pairs}
        if not own.keys() >= {*map(id, params)}:
            raise Unlike("an averaged model is not of all parameters")
        return [own[id(p)] for p in params]

    def apply(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        number: torch.Tensor,
    ) -> None:
        """Update some averages, which are on the device where the number is."""
        for own, source in _groups(pairs):
            if self.first:
                torch._foreach_copy_(own, source)
            elif self.function is not None:
                self.function(own, source, number)
            elif self.single is not None:
                for a, p in zip(own, source, strict=True):
                    a.copy_(self.single(a, p, number))

    def finish(self, done: Iterable[torch.Tensor]) -> None:
        """Do the rest, where the averages of some parameters have been updated."""
        known = {*map(id, done)}
        rest = [(a.detach(), p.detach()) for a, p in self.pairs if id(p) not in known]
        for own, source in _groups(rest):
            self.apply(zip(own, source, strict=True), self.number.to(own[0].device))
        for own, source in self.follows:
            torch._foreach_copy_(own, source)
        self.number.add_(1)

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
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
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
        made.pairs = self._pairs
        made.key = _key(made)
        same = known is number and version == number._version
        made.first = not same and int(number) == 0
        if made.key is not None:
            made.key = *made.key, made.first
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
        every = [*chain(own, source, *follows)]
        # views are given of them, which are of the memory that they have now
        seen = [*map(id, every), *(t.data_ptr() for t in every)]
        if seen == self._seen:
            return
        check_beside("an averaged model", own, source, any_dtype=True)
        check_beside("an averaged model's buffers", *follows, any_dtype=True)
        self._pairs = [*zip(own, source, strict=True)]
        self._groups = _groups((a.detach(), p.detach()) for a, p in self._pairs)
        self._follows = [follows] if follows[0] else []
        self._seen = seen


def _groups(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[Tensors, Tensors]]:
    """Averages and what they are of, as torch groups them: by device and dtype."""
    groups: dict[Any, tuple[Tensors, Tensors]] = {}
    for a, p in pairs:
        mine, theirs = groups.setdefault((a.device, a.dtype, p.dtype), ([], []))
        mine.append(a)
        theirs.append(p)
    return [*groups.values()]


def _key(x: Updated) -> tuple[Any, ...] | None:
    """See Updated; of torch's own functions, but for the one that takes a tensor for a
    number.
    """
    function = x.single if x.function is None else x.function
    bare = inspect.unwrap(function) if callable(function) else None
    if not isinstance(bare, types.FunctionType) or bare.__code__ not in _ALIKE:
        return None
    held = [cell.cell_contents for cell in bare.__closure__ or ()]
    return bare.__code__, *((type(value), repr(value)) for value in held)


#: The code of functions that do the same to each element.
_MAKE: tuple[Callable[[], Any], ...] = (
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
)
_ALIKE = {inspect.unwrap(make()).__code__ for make in _MAKE}


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
