"""Convert what an optimizer holds to comparable data."""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from ..compiler.code_paths import PLAIN
from .keys import OddValue

#: Attributes that the function of a step does not read.
OUTSIDE = frozenset({"state", "param_groups", "step", "__getstate__"})


@functools.lru_cache(1024)
def is_hooks(name: str) -> bool:
    """Is this the name of an attribute in which torch stores hooks?"""
    return name.endswith("_hooks")


def holdings(
    x: Any, tensor: Callable[[torch.Tensor], Any], seen: frozenset[int] = frozenset()
) -> Any:
    """Return the contents of a Python value as comparable data.

    `tensor(t)` returns the data of a tensor. Raises OddValue for values that are not
    plain data.
    """
    if isinstance(x, torch.Tensor):
        return tensor(x)
    if isinstance(x, PLAIN):
        return type(x), repr(x)
    if isinstance(x, (types.FunctionType, types.BuiltinFunctionType, type)):
        return id(x)
    if id(x) in seen:
        raise OddValue("its state contains itself", x)
    seen |= {id(x)}
    if type(x) in (dict, collections.OrderedDict, collections.defaultdict):
        return type(x), [
            (holdings(k, tensor, seen), holdings(v, tensor, seen)) for k, v in x.items()
        ]
    if type(x) in (list, tuple, torch.Size):
        return type(x), [holdings(y, tensor, seen) for y in x]
    if isinstance(x, weakref.ref):
        return id(x)
    raise OddValue(f"it holds a {type(x).__name__}, an unsupported type", x)


def own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer that a step may read, besides its lanes."""
    return {
        k: v for k, v in vars(optimizer).items() if k not in OUTSIDE and not is_hooks(k)
    }
