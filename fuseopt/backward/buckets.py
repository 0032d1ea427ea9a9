"""Parameters -> buckets of them, which fill one after the other as a backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import ConfigError, UnsupportedInput

Bucket = list[torch.Tensor]
#: Bytes of parameters in a bucket, unless told otherwise.
BYTES = 32 << 20


def buckets_of(
    wanted: Any, model: torch.nn.Module | None, params: Sequence[torch.Tensor]
) -> list[Bucket]:
    """The parameters of an optimizer in buckets, those first that get their gradients
    first: the last ones. A bucket lies on one device.

    Raises ConfigError for a wish that nobody understands, UnsupportedInput for
    parameters that are in two buckets, in none, or not in the optimizer.
    """
    if wanted == "layer":
        if model is None:
            raise ConfigError('buckets="layer" needs the model, not its parameters')
        found = _layers(model, params)
    elif isinstance(wanted, int) and not isinstance(wanted, bool):
        if wanted < 1:
            raise ConfigError(f"buckets={wanted} bytes; it must be above zero")
        found = _of_size(wanted, params)
    elif isinstance(wanted, (list, tuple)):
        found = _as_told(wanted, params)
    else:
        raise ConfigError(
            f"buckets={wanted!r}; it is a number of bytes, 'layer' or a list of lists "
            "of parameters"
        )
    return [own for bucket in found for own in _by_device(bucket)]


def _layers(model: torch.nn.Module, params: Sequence[torch.Tensor]) -> list[Bucket]:
    left = {id(p): p for p in params}
    found = []
    for module in model.modules():
        own = module.parameters(recurse=False)
        found.append([left.pop(id(p)) for p in own if id(p) in left])
    # those that no module of the model holds
    found.insert(0, list(left.values()))
    return [bucket for bucket in reversed(found) if bucket]


def _of_size(size: int, params: Sequence[torch.Tensor]) -> list[Bucket]:
    found: list[Bucket] = []
    room = 0
    for p in reversed(params):
        room -= p.numel() * p.element_size()
        if room < 0 or not found:
            found.append([])
            room = size - p.numel() * p.element_size()
        found[-1].append(p)
    return found


def _as_told(wanted: Iterable[Any], params: Sequence[torch.Tensor]) -> list[Bucket]:
    known = {id(p) for p in params}
    seen: set[int] = set()
    found = []
    for k, bucket in enumerate(wanted):
        if isinstance(bucket, torch.Tensor):
            raise ConfigError("buckets is a list of lists of parameters, not of these")
        own = list(bucket)
        for p in own:
            shape = tuple(getattr(p, "shape", ()))
            if id(p) not in known:
                raise UnsupportedInput(
                    f"bucket {k} has a parameter of shape {shape} that the optimizer "
                    "does not have"
                )
            if id(p) in seen:
                raise UnsupportedInput(
                    f"a parameter of shape {shape} is in two buckets, or twice in "
                    f"bucket {k}"
                )
            seen.add(id(p))
        found.append(own)
    missing = [tuple(p.shape) for p in params if id(p) not in seen]
    if missing:
        raise UnsupportedInput(
            f"{len(missing)} parameters of the optimizer are in no bucket, the first "
            f"of shape {missing[0]}"
        )
    return [bucket for bucket in found if bucket]


def _by_device(bucket: Bucket) -> list[Bucket]:
    found: dict[torch.device, Bucket] = {}
    for p in bucket:
        found.setdefault(p.device, []).append(p)
    return list(found.values())
