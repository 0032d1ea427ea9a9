"""Where what a graph is given lies in an optimizer, besides its lanes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ..shadow.double import own_attributes
from ..shadow.state_guard import Place

_SOURCE = re.compile(
    r"L\['self'\]\.(?:param_groups\[(\d+)\]\['(\w+)'\]|(\w+))(?:\[(\d+)\])?"
)


def place_of(source: str) -> Place | None:
    """Where a number lies that Dynamo names so; None: elsewhere."""
    found = _SOURCE.fullmatch(source)
    if not found:
        return None
    group, key, name, item = found.groups()
    place: Place = name if group is None else (int(group), key)
    return place if item is None else (place, int(item))


def held_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """The tensors that an optimizer holds besides its lanes."""
    waiting: list[Any] = list(own_attributes(optimizer).values())
    for group in optimizer.param_groups:
        waiting += [v for k, v in group.items() if k != "params"]
    while waiting:
        x = waiting.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, dict):
            waiting += x.values()
        elif isinstance(x, (list, tuple)):
            waiting += x
