"""Find the places of a graph's numbers, and the tensors, that belong to no lane."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ..inputs.state_guard import Place
from ..inputs.values import own_attributes

_SOURCE = re.compile(
    r"L\['self'\]\.(?:param_groups\[(\d+)\]\['(\w+)'\]|(\w+))(?:\[(\d+)\])?"
)


def place_of(source: str) -> Place | None:
    """Return the Place that Dynamo's source of a number names, or None."""
    match = _SOURCE.fullmatch(source)
    if not match:
        return None
    group, key, name, item = match.groups()
    place: Place = name if group is None else (int(group), key)
    return place if item is None else (place, int(item))


def held_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer holds besides its lanes."""
    pending: list[Any] = list(own_attributes(optimizer).values())
    for group in optimizer.param_groups:
        pending += [v for k, v in group.items() if k != "params"]
    while pending:
        x = pending.pop()
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, dict):
            pending += x.values()
        elif isinstance(x, (list, tuple)):
            pending += x


def is_state(source: str | None) -> bool:
    """Does Dynamo's source of a number name an entry of a parameter's state?"""
    return source is not None and source.startswith("L['self'].state[")
