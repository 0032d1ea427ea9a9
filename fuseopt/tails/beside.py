"""What a tail keeps beside the parameters: averages of all kinds, and copies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any

import torch
from torch.optim.swa_utils import AveragedModel

from .adapters import Average, kind_of
from .arguments import check_beside, checked_decay
from .models import Averaged

Tensors = list[torch.Tensor]


class Beside:
    """Averages, their decays, models, objects of other packages; copies.

    `alone`: why objects are updated by themselves, "" while they are not.
    """

    def __init__(
        self, ema: Iterable[Any], copies: Iterable[torch.Tensor] | None
    ) -> None:
        self.averages: list[tuple[Tensors, Tensors | None]] = []
        self.decays: list[Any] = []
        self.models: list[Averaged] = []
        self.objects: list[Average] = []
        self.copies = None if copies is None else list(copies)
        self.alone = ""
        self._asked: tuple[bool, int | None] = True, None
        self._known: Tensors = []
        self._checked: tuple[list[Any], list[Any]] = [], []
        for entry in ema:
            self._add(entry)

    def _add(self, entry: Any) -> None:
        if not isinstance(entry, (tuple, list)) or len(entry) not in (2, 3):
            raise TypeError("ema takes pairs of a list of averages and a decay")
        if isinstance(entry[0], AveragedModel):
            if len(entry) != 2 or not isinstance(entry[1], torch.nn.Module):
                raise TypeError("beside an AveragedModel, ema takes the model it is of")
            self.models.append(Averaged(*entry))
            return
        kind = None if isinstance(entry[0], (tuple, list)) else kind_of(entry[0])
        if kind is not None:
            self.objects.append(Average(entry[0], _source(entry, kind[0])))
            return
        if not isinstance(entry[0], Iterable):
            raise TypeError(f"ema takes no {type(entry[0]).__name__}: see docs/tail.md")
        own, *source, decay = entry
        self.averages.append((list(own), list(source[0]) if source else None))
        self.decays.append(checked_decay(decay))

    def check(self, every: Tensors) -> tuple[list[Any], list[Any]]:
        """Averages and copies, each with what they are of: all parameters, if nothing
        else was named.
        """
        known = self._known
        if len(known) != len(every) or not all(map(is_, known, every)):
            averages = []
            for k, (own, source) in enumerate(self.averages):
                of = every if source is None else source
                check_beside(f"average {k}", own, of)
                averages.append((own, of))
            copies = []
            if self.copies is not None:
                check_beside("copies", self.copies, every)
                copies = [(self.copies, every)]
            self._checked, self._known = (averages, copies), every
        return self._checked

    def ask(self, average: bool, step: int | None) -> None:
        """Say what the next call does: are averages updated, and at which step?"""
        self._asked = average, step

    def content(self, every: Tensors, decays: list[Any]) -> dict[str, Any]:
        """What of it a call is given; see `sequence.TailInputs`."""
        average = self._asked[0]
        if len(decays) != len(self.averages):
            raise ValueError(f"{len(decays)} decays for {len(self.averages)} averages")
        checked = [checked_decay(decay) for decay in decays]
        averages, copies = self.check(every)
        return {
            "averages": averages if average else [],
            "decays": checked if average else [],
            "models": [x.update() for x in self.models] if average else [],
            "objects": [],
            "copies": copies,
        }

    def trace(self, content: dict[str, Any]) -> None:
        """Have objects updated in the graph, if that can be."""
        average, step = self._asked
        if not average or self.alone:
            return
        try:
            content["objects"] = [x.update(step) for x in self.objects]
        except Exception as error:
            self.alone = str(error) or type(error).__name__

    def end(self, content: Mapping[str, Any]) -> None:
        """What is left for the host, when all has been done."""
        average, step = self._asked
        if not average:
            return
        for model in self.models:
            model.updated()
        for x in self.objects:
            if content["objects"]:
                x.updated()
            else:
                x.call(step)


def _source(entry: Any, held: str) -> Any:
    """What an object is an average of. Raises TypeError for what it cannot be."""
    name = type(entry[0]).__name__
    if len(entry) != 2:
        raise TypeError(f"beside a {name}, ema takes what it is an average of")
    source = entry[1]
    if isinstance(source, torch.nn.Module):
        return source
    if held == "module" or isinstance(source, (int, float, str, torch.Tensor)):
        raise TypeError(f"beside a {name}, ema takes the model it is of")
    return list(source)
