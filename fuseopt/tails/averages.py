"""Averages and copies of a tail: lists, averaged models, objects of packages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from .adapters import Average, kind_of
from .arguments import check_beside, checked_decay, entries_of
from .models import AveragedPair

Tensors = list[torch.Tensor]


class Averages:
    """Averages of a tail with their decays, averaged models, averages of other
    packages, and copies.

    `alone` is the reason why averages of other packages are updated untraced, or "".
    """

    def __init__(
        self, ema: Iterable[Any], copies: Iterable[torch.Tensor] | None
    ) -> None:
        #: the user's lists of averages and of their sources, and of copies
        self._given: list[tuple[Tensors, Tensors | None]] = []
        self._copies = None if copies is None else entries_of(copies)
        self.decays: list[Any] = []
        self.models: list[AveragedPair] = []
        self.objects: list[Average] = []
        self.alone = ""
        self._call: tuple[bool, int | None] = True, None
        #: the parameters at the last check, and its result
        self._params: Tensors = []
        self._checked: tuple[list[Any], list[Any]] = [], []
        for entry in ema:
            self._add(entry)
        self.follow()

    @property
    def names_sources(self) -> bool:
        """Has the user named what is averaged?"""
        return any(source is not None for _, source in self._given)

    @property
    def lists(self) -> list[Tensors]:
        """The user's lists."""
        every = [x for pair in self._given for x in pair if x is not None]
        return every if self._copies is None else [*every, self._copies]

    def follow(self) -> None:
        """Copy the user's lists again; the next call checks them."""
        self.averages = [
            ([*averages], None if source is None else [*source])
            for averages, source in self._given
        ]
        self.copies = None if self._copies is None else [*self._copies]
        self._params = []

    def _add(self, entry: Any) -> None:
        if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
            raise TypeError("ema takes pairs of a list of averages and a decay")
        if isinstance(entry[0], AveragedModel):
            if len(entry) != 2 or not isinstance(entry[1], torch.nn.Module):
                raise TypeError(
                    "beside an AveragedModel, ema takes the model that it averages"
                )
            self.models.append(AveragedPair(*entry))
            return
        kind = None if isinstance(entry[0], (tuple, list)) else kind_of(entry[0])
        if kind is not None:
            self.objects.append(Average(entry[0], _source(entry, kind[0])))
            return
        if not isinstance(entry[0], Iterable):
            raise TypeError(f"ema takes no {type(entry[0]).__name__}: see docs/tail.md")
        averages, *source, decay = entry
        named = entries_of(source[0]) if source else None
        self._given.append((entries_of(averages), named))
        self.decays.append(checked_decay(decay))

    def check(self, params: Tensors) -> tuple[list[Any], list[Any]]:
        """Return pairs of averages and their sources, and of copies and the parameters.
        The sources are `params` unless the user named others. Raises ValueError,
        TypeError.
        """
        known = self._params
        if len(known) != len(params) or not all(map(is_, known, params)):
            averages = []
            for k, (tensors, named) in enumerate(self.averages):
                source = params if named is None else named
                check_beside(f"average {k}", tensors, source)
                averages.append((tensors, source))
            copies = []
            if self.copies is not None:
                check_beside("copies", self.copies, params)
                copies = [(self.copies, params)]
            self._checked, self._params = (averages, copies), params
        return self._checked

    def set_call(self, average: bool, step: int | None) -> None:
        """Set whether the next call updates averages, and at which step."""
        self._call = average, step

    def tail_inputs(self, params: Tensors, decays: list[Any]) -> dict[str, Any]:
        """Return attributes of a call's `TailInputs`. Raises ValueError, TypeError."""
        average = self._call[0]
        if len(decays) != len(self.averages):
            raise ValueError(f"{len(decays)} decays for {len(self.averages)} averages")
        checked_decays = [checked_decay(decay) for decay in decays]
        averages, copies = self.check(params)
        return {
            "averages": averages if average else [],
            "decays": checked_decays if average else [],
            "models": [model.update() for model in self.models] if average else [],
            "objects": [],
            "copies": copies,
        }

    def trace(self, tail_inputs: dict[str, Any]) -> None:
        """Add the updates of averages of other packages to the graph, if possible."""
        updates, step = self._call
        if not updates or self.alone:
            return
        try:
            tail_inputs["objects"] = [x.update(step) for x in self.objects]
        except Exception as error:
            self.alone = str(error) or type(error).__name__

    def end(self, tail_inputs: Mapping[str, Any]) -> None:
        """Do the host's part of the updates, after all launches."""
        updates, step = self._call
        if not updates:
            return
        for model in self.models:
            model.updated()
        for average_object in self.objects:
            if tail_inputs["objects"]:
                average_object.updated()
            else:
                average_object.call(step)


def _source(entry: Any, attribute: str) -> Any:
    """Return the source of an average of another package. Raises TypeError."""
    name = type(entry[0]).__name__
    if len(entry) != 2:
        raise TypeError(f"beside a {name}, ema takes the parameters that it averages")
    source = entry[1]
    if isinstance(source, torch.nn.Module):
        return source
    if attribute == "module" or isinstance(source, (int, float, str, torch.Tensor)):
        raise TypeError(f"beside a {name}, ema takes the model that it averages")
    return entries_of(source)
