"""Divide parameters into buckets, which fill one after another in a backward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import ConfigError, UnsupportedInput

Bucket = list[torch.Tensor]
#: Default number of bytes of parameters in a bucket.
BYTES = 32 << 20
#: A bucket with less than this part of its bytes takes one more parameter of any size.
#: Each bucket costs the host as much as a step, and a bias takes little memory.
SMALL = 1 / 8


def buckets_of(
    wanted: Any, model: torch.nn.Module | None, params: Sequence[torch.Tensor]
) -> list[Bucket]:
    """Return the parameters of an optimizer in buckets, each on one device. The last
    parameters are first, since they get their gradients first.

    `wanted` is a number of bytes, "layer", or lists of parameters. Raises ConfigError
    for other values. Raises UnsupportedInput for parameters that are in two buckets, in
    none, or not in the optimizer.
    """
    if wanted == "layer":
        if model is None:
            raise ConfigError('buckets="layer" needs the model, not its parameters')
        buckets = _layers(model, params)
    elif isinstance(wanted, int) and not isinstance(wanted, bool):
        if wanted < 1:
            raise ConfigError(f"buckets={wanted} bytes; it must be above zero")
        buckets = _of_size(wanted, params)
    elif isinstance(wanted, (list, tuple)):
        buckets = _as_listed(wanted, params)
    else:
        raise ConfigError(
            f"buckets={wanted!r}; it is a number of bytes, 'layer' or a list of lists "
            "of parameters"
        )
    return [part for bucket in buckets for part in _by_device(bucket)]


def _layers(model: torch.nn.Module, params: Sequence[torch.Tensor]) -> list[Bucket]:
    remaining = {id(p): p for p in params}
    buckets = []
    for module in model.modules():
        params_of_module = module.parameters(recurse=False)
        buckets.append(
            [remaining.pop(id(p)) for p in params_of_module if id(p) in remaining]
        )
    # the parameters that no module of the model has
    buckets.insert(0, list(remaining.values()))
    return [bucket for bucket in reversed(buckets) if bucket]


def _of_size(size: int, params: Sequence[torch.Tensor]) -> list[Bucket]:
    buckets: list[Bucket] = []
    taken = 0
    for p in reversed(params):
        own = p.numel() * p.element_size()
        if not buckets or (taken + own > size and taken >= SMALL * size):
            buckets.append([])
            taken = 0
        buckets[-1].append(p)
        taken += own
    return buckets


def _as_listed(wanted: Iterable[Any], params: Sequence[torch.Tensor]) -> list[Bucket]:
    ids = {id(p) for p in params}
    seen: set[int] = set()
    buckets = []
    for k, bucket in enumerate(wanted):
        if isinstance(bucket, torch.Tensor):
            raise ConfigError("buckets is a list of lists of parameters, not of these")
        params_of_bucket = list(bucket)
        for p in params_of_bucket:
            shape = tuple(getattr(p, "shape", ()))
            if id(p) not in ids:
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
        buckets.append(params_of_bucket)
    missing = [tuple(p.shape) for p in params if id(p) not in seen]
    if missing:
        raise UnsupportedInput(
            f"{len(missing)} parameters of the optimizer are in no bucket, the first "
            f"of shape {missing[0]}"
        )
    return [bucket for bucket in buckets if bucket]


def _by_device(bucket: Bucket) -> list[Bucket]:
    by_device: dict[torch.device, Bucket] = {}
    for p in bucket:
        by_device.setdefault(p.device, []).append(p)
    return list(by_device.values())
