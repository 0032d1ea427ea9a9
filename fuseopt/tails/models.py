"""Update torch.optim.swa_utils.AveragedModel as a part of a tail."""

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
from ..inputs.keys import LanesDiffer
from .arguments import check_beside

Tensors = list[torch.Tensor]


class ModelUpdate:
    """One update of an averaged model, in the form that Dynamo traces.

    `groups` are pairs (averages, sources), each of one device and dtype. `follows` are
    pairs (buffers, sources) that are only copied. `function` and `single` are the
    model's `multi_avg_fn` and `avg_fn`. `number` is the number of updates so far.
    `first` is true for the first update, which copies. `pairs` has all averages with
    their sources. `key` is equal for updates that do the same to each element; it is
    None for functions that may treat elements differently.
    """

    groups: list[tuple[Tensors, Tensors]]
    follows: list[tuple[Tensors, Tensors]]
    function: Callable[..., Any] | None
    single: Callable[..., Any] | None
    number: torch.Tensor
    first: bool
    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    key: Any

    def alone(self) -> ModelUpdate:
        """Return the function of this update, without tensors."""
        copy = ModelUpdate()
        copy.function, copy.single, copy.first = self.function, self.single, self.first
        return copy

    def beside(self, params: Sequence[torch.Tensor]) -> Tensors:
        """Return the averages of some parameters. Raises LanesDiffer."""
        average_of = {id(p): a for a, p in self.pairs}
        if not average_of.keys() >= {*map(id, params)}:
            raise LanesDiffer("an averaged model does not cover all parameters")
        return [average_of[id(p)] for p in params]

    def apply(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        number: torch.Tensor,
    ) -> None:
        """Update some averages. `number` is the number of updates so far."""
        for averages, source in _groups(pairs):
            self.average(averages, source, number)

    def average(self, averages: Tensors, source: Tensors, number: torch.Tensor) -> None:
        """Update averages of one device and dtype; traced, and in eager."""
        if self.first:
            torch._foreach_copy_(averages, source)
            return
        number = number.to(averages[0].device)
        if self.function is not None:
            self.function(averages, source, number)
        elif self.single is not None:
            for a, p in zip(averages, source, strict=True):
                a.copy_(self.single(a, p, number))

    def finish(self, params: Iterable[torch.Tensor]) -> None:
        """Finish an update after the averages of `params` have been updated."""
        updated_ids = {*map(id, params)}
        remaining = [
            (a.detach(), p.detach()) for a, p in self.pairs if id(p) not in updated_ids
        ]
        self.apply(remaining, self.number)
        for averages, source in self.follows:
            torch._foreach_copy_(averages, source)
        self.number.add_(1)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Return all tensors that the update writes."""
        yield self.number
        for averages, _ in (*self.groups, *self.follows):
            yield from averages


class AveragedPair:
    """AveragedModel and its model. Raises ValueError if their tensors differ."""

    def __init__(self, averaged: AveragedModel, model: torch.nn.Module) -> None:
        self.averaged = averaged
        self.model = model
        #: the counter of updates when it was last found not to be zero, and its version
        self._known: tuple[Any, int] = None, -1
        self._seen: list[int] = []
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._groups: list[tuple[Tensors, Tensors]] = []
        self._follows: list[tuple[Tensors, Tensors]] = []
        self._read()

    def update(self) -> ModelUpdate:
        """Return the update of a call. Wait for the device if other code wrote the
        counter since the last update.
        """
        self._read()
        number = self.averaged.n_averaged
        counter, version = self._known
        new_update = ModelUpdate()
        new_update.groups, new_update.follows = self._groups, self._follows
        new_update.function, new_update.single = (
            self.averaged.multi_avg_fn,
            self.averaged.avg_fn,
        )
        if new_update.function is None and new_update.single is None:
            lists = all(
                averages[0].device.type in compat.devices_with_lists()
                for averages, _ in self._groups
            )
            make: Any = get_swa_multi_avg_fn if lists else get_swa_avg_fn
            if lists:
                new_update.function = make()
            else:
                new_update.single = make()
        new_update.number = number
        new_update.pairs = self._pairs
        new_update.key = _key(new_update)
        same = counter is number and version == number._version
        new_update.first = not same and int(number) == 0
        if new_update.key is not None:
            new_update.key = *new_update.key, new_update.first
        return new_update

    def updated(self) -> None:
        """Note that an update was done, so that the counter is not zero."""
        number = self.averaged.n_averaged
        self._known = number, number._version

    def _read(self) -> None:
        averaged, model = self.averaged, self.model
        inner: Any = averaged.module
        averages: Tensors = list(averaged.parameters())
        source: Tensors = list(model.parameters())
        follows: tuple[Tensors, Tensors] = list(inner.buffers()), list(model.buffers())
        if averaged.use_buffers:
            averages, source = averages + follows[0], source + follows[1]
            follows = [], []
        tensors = [*chain(averages, source, *follows)]
        # the views in `_pairs` and `_groups` have the present memory of these
        ids_and_addresses = [*map(id, tensors), *(t.data_ptr() for t in tensors)]
        if ids_and_addresses == self._seen:
            return
        check_beside("an averaged model", averages, source, any_dtype=True)
        check_beside("an averaged model's buffers", *follows, any_dtype=True)
        self._pairs = [*zip(averages, source, strict=True)]
        self._groups = _groups((a.detach(), p.detach()) for a, p in self._pairs)
        self._follows = [follows] if follows[0] else []
        self._seen = ids_and_addresses


def _groups(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
) -> list[tuple[Tensors, Tensors]]:
    """Return pairs (averages, sources), grouped by device and dtypes as in torch."""
    groups: dict[Any, tuple[Tensors, Tensors]] = {}
    for a, p in pairs:
        averages, sources = groups.setdefault((a.device, a.dtype, p.dtype), ([], []))
        averages.append(a)
        sources.append(p)
    return [*groups.values()]


def _key(averaging: ModelUpdate) -> tuple[Any, ...] | None:
    """Return the key of an update, see ModelUpdate. All of torch's functions have one,
    except the one that reads a tensor as a number.
    """
    function = averaging.single if averaging.function is None else averaging.function
    unwrapped = inspect.unwrap(function) if callable(function) else None
    if (
        not isinstance(unwrapped, types.FunctionType)
        or unwrapped.__code__ not in _ALIKE
    ):
        return None
    closure_values = [cell.cell_contents for cell in unwrapped.__closure__ or ()]
    if not all(type(value) in (bool, int, float) for value in closure_values):
        return None  # a decay that may change, such as a tensor
    return unwrapped.__code__, *((type(value), repr(value)) for value in closure_values)


#: Functions of torch that do the same to each element, and their code.
_MAKE: tuple[Callable[[], Any], ...] = (
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
    get_swa_avg_fn,
)
_ALIKE = {inspect.unwrap(make()).__code__ for make in _MAKE}


def update(models: Iterable[ModelUpdate]) -> None:
    """Do the work of AveragedModel.update_parameters; traced, and in eager."""
    for model in models:
        for averages, source in model.groups:
            model.average(averages, source, model.number)
        for averages, source in model.follows:
            torch._foreach_copy_(averages, source)
        model.number.add_(1)
